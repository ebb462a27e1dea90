"""The policy on vLLM servers while it is trained: what they can take, and how an adapter gets there."""

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from .config import MemPOConfig
from .endpoints import CompletionsGenerator, Unavailable
from .generation import GenerationError, run_in_event_loop
from .processes import on_all_processes


logger = logging.getLogger(__name__)

# What vLLM doesn't know of LoRA, as a field of its configuration and the value without it. Some of it a server would
# refuse, some it would ignore and sample from another policy.
_UNKNOWN_TO_VLLM = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
}
# Initialisations that take a part of the base weights away, which the server has still.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def check_adapter(config: PeftConfig) -> None:
    """
    Find out whether vLLM can sample from an adapter.

    Args:
        config ([`~peft.PeftConfig`]):
            Configuration of the adapter.

    Raises:
        ValueError: If it can't, or would sample from something else; the message names the field and its value.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"The adapter is {config.peft_type}; vLLM servers take LoRA adapters (`LoraConfig`).")
    for name, without in _UNKNOWN_TO_VLLM.items():
        value = vars(config).get(name, without)
        if value != without and value:
            raise ValueError(
                f"`LoraConfig` has `{name}` = {value!r}, which vLLM's adapters don't know. Leave it out, or sample "
                "without a server (`use_vllm=False`)."
            )
    method = config.init_lora_weights
    if isinstance(method, str) and method.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"`LoraConfig` has `init_lora_weights` = {method!r}, which changes the base weights, and the server has "
            "the original ones. Use `True`, `'gaussian'` or `'eva'`."
        )


def adapter_state_dict(
    model: PeftModel, wrapped: torch.nn.Module, accelerator: Accelerator
) -> dict[str, torch.Tensor]:
    """
    The weights of the active adapter, whole and on the CPU. Collective: sharded weights are gathered.

    Args:
        model ([`~peft.PeftModel`]):
            The policy.
        wrapped (`torch.nn.Module`):
            The same as it is trained, which FSDP or DeepSpeed may have wrapped.
        accelerator ([`~accelerate.Accelerator`]):
            Knows how the weights are sharded.

    Returns:
        `dict[str, torch.Tensor]`: By the names under which PEFT saves them.
    """
    backend = DistributedBackend(accelerator)
    model = accelerator.unwrap_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad(), backend.gather_params(trained), backend.summon_full_params(wrapped, writeback=False):
        state = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
            for name, tensor in state.items()
        }


def write_adapter(folder: Path, config: PeftConfig, state_dict: dict[str, torch.Tensor]) -> Path:
    """
    Write an adapter as a subfolder that is named after its content, in one move: a reader meets all of it or nothing.

    Args:
        folder (`Path`):
            Folder of all versions.
        config ([`~peft.PeftConfig`]):
            Configuration of the adapter.
        state_dict (`dict[str, torch.Tensor]`):
            Its weights.

    Returns:
        `Path`: The subfolder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    partial.chmod(0o755)  # the server may be another user's
    save_file(state_dict, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(partial.iterdir()):
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    written = folder / f"mempo-{digest.hexdigest()}"
    if written.exists():
        shutil.rmtree(partial)
    else:
        os.rename(partial, written)
    return written


class AdapterGenerator(CompletionsGenerator):
    """
    [`~mempo_trl.endpoints.CompletionsGenerator`] that samples from an adapter in training.

    The server knows each version of the adapter under a name that is made from its weights. So a server without it
    refuses the request, a stale adapter can't answer, and what a prefix cache holds of older versions is never read. A
    server that was restarted gets the version again.

    Args:
        urls, eos_token_ids, kwargs:
            As in [`~mempo_trl.endpoints.CompletionsGenerator`].
        folder (`str`):
            Where adapters are written. The servers must see it under the same path.
    """

    def __init__(self, urls: str | list[str], *, eos_token_ids: list[int], folder: str, **kwargs):
        super().__init__(urls, "", eos_token_ids=eos_token_ids, **kwargs)
        self.folder = Path(folder).resolve()
        self.adapter: Path | None = None
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, rollouts: list[Coroutine], numbers: list[int] | None = None) -> list[Any]:
        self._locks.clear()  # a lock belongs to its event loop
        return await super().run(rollouts, numbers)

    async def check(self) -> None:
        """
        Find out whether every server is there and takes adapters at run time.

        Raises:
            GenerationError: If one doesn't; the message names it and the remedy.
        """
        await super().check()
        async with self._open_client() as self._client:
            for url in self.urls:
                # Nothing can be loaded from this: a server that knows the request says so, another has no such path.
                response = await self._send(url, "load_lora_adapter", {"lora_name": "", "lora_path": ""})
                if response.status_code in (404, 405):
                    raise GenerationError(
                        f"{url} takes no adapters at run time (HTTP {response.status_code}). Start it with "
                        "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve … --enable-lora`."
                    )

    def sync(self, model: PeftModel, wrapped: torch.nn.Module, accelerator: Accelerator) -> None:
        """
        Put the adapter as it is now on every server and sample from it from then on. Collective.

        Args:
            model, wrapped, accelerator:
                As in [`adapter_state_dict`].

        Raises:
            GenerationError: If a server doesn't take it; the message names the server and what it said.
        """
        state_dict = adapter_state_dict(model, wrapped, accelerator)
        config = accelerator.unwrap_model(model).active_peft_config

        def put() -> Path | None:
            if not accelerator.is_main_process:
                return None
            adapter = write_adapter(self.folder, config, state_dict)
            if adapter != self.adapter:
                run_in_event_loop(self.load(adapter))
            for other in self.folder.iterdir():
                if other != adapter:
                    shutil.rmtree(other, ignore_errors=True)
            return adapter

        (self.adapter,) = broadcast_object_list([on_all_processes(put)])
        self.model = self.adapter.name

    async def load(self, adapter: Path) -> None:
        """
        Load an adapter on every server, and unload the one that is in use.

        Args:
            adapter (`Path`):
                Its folder, which the servers must see under the same path.

        Raises:
            GenerationError: If a server doesn't take it; the message names the server and what it said.
        """
        async with self._open_client() as self._client:
            await asyncio.gather(*[self._retry(url, self._load_on, url, adapter) for url in self.urls])
            if self.adapter not in (None, adapter):
                await asyncio.gather(*[self._unload(url, self.model) for url in self.urls])

    async def _load_on(self, url: str, adapter: Path) -> None:
        response = await self._send(url, "load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter)})
        if response.is_success or "already been loaded" in response.text:
            return
        if response.status_code in (502, 503, 504):  # with 500 vLLM says whatever is wrong with an adapter
            raise Unavailable(f"HTTP {response.status_code}")
        raise GenerationError(
            f"{self._refusal(url, response)} when it was given the adapter {adapter}. The server must see "
            "this folder under the same path, serve the base model of the training, and be started with "
            "`--enable-lora` and a `--max-lora-rank` of at least the adapter's rank."
        )

    async def _unload(self, url: str, name: str) -> None:
        # It costs the server a little memory, no more: one that doesn't answer here is not waited for.
        try:
            await self._client.post(f"{url}/unload_lora_adapter", json={"lora_name": name}, timeout=30)
        except httpx.RequestError:
            logger.info("%s did not unload the adapter %s.", url, name)

    async def _refused(self, url: str, response: httpx.Response) -> None:
        if response.status_code != 404:
            await super()._refused(url, response)
        async with self._locks[url]:
            await self._load_on(url, self.adapter)
        raise Unavailable(f"it did not have the adapter {self.model}, and has got it again")

    async def _post(self, url: str, body: dict) -> dict:
        data = await super()._post(url, body)
        if data.get("model") != self.model:
            raise GenerationError(
                f"{url} answered with the model {data.get('model')!r} instead of the adapter {self.model!r}. What "
                "stands between trainer and server must pass the field `model` on."
            )
        return data


def policy_generator(
    args: MemPOConfig, eos_token_ids: list[int], adapter: bool, process_index: int
) -> tuple[CompletionsGenerator, int | None]:
    """
    The generator of a training with `vllm_mode="server"`, once its servers are there.

    Args:
        args ([`~mempo_trl.MemPOConfig`]):
            Configuration.
        eos_token_ids (`list[int]`):
            Ids that end a turn.
        adapter (`bool`):
            Whether an adapter is trained.
        process_index (`int`):
            Number of this process.

    Returns:
        `tuple[CompletionsGenerator, int | None]`: The generator, and the tokens that prompt and completion may have
        together on every server.

    Raises:
        GenerationError: If a server can't be reached within `vllm_server_timeout` seconds, or takes no adapter.
    """
    urls = args.vllm_server_urls or [
        args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    ]
    extra_body = {
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        **(args.generation_kwargs or {}),
    }
    if args.vllm_structured_outputs_regex is not None:
        extra_body["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    first = process_index % len(urls)
    settings = {
        # Each process knows its own rollouts only: all would else begin with the same server.
        "urls": urls[first:] + urls[:first],
        "eos_token_ids": eos_token_ids,
        "max_completion_length": args.max_completion_length,
        "temperature": args.temperature,
        "max_concurrency": args.generation_batch_size,
        "retry_seconds": args.vllm_server_timeout,
        "extra_body": extra_body,
    }
    if adapter:
        generator = AdapterGenerator(folder=f"{args.output_dir}/served_adapter", **settings)
    else:
        generator = CompletionsGenerator(model="", **settings)

    async def look() -> list[dict]:
        models = await generator.served_models()
        await generator.check()
        return models

    models = run_in_event_loop(look())
    if not adapter:
        generator.model = models[0]["id"]
    return generator, min((model["max_model_len"] for model in models if model.get("max_model_len")), default=None)
