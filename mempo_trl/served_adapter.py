"""The LoRA adapter that is trained, on the vLLM servers that sample from it: what they can take, and how it gets there."""

import asyncio
import os
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend

from .endpoints import CompletionsGenerator, Unavailable
from .generation import GenerationError


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


def write_adapter(folder: Path, config: PeftConfig, state_dict: dict[str, torch.Tensor]) -> None:
    """
    Write an adapter's folder in one move: a reader meets all of it or nothing.

    Args:
        folder (`Path`):
            Where it goes; it must not exist.
        config ([`~peft.PeftConfig`]):
            Its configuration.
        state_dict (`dict[str, torch.Tensor]`):
            Its weights.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    partial.chmod(0o755)  # the server may be another user's
    save_file(state_dict, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    os.rename(partial, folder)


class AdapterGenerator(CompletionsGenerator):
    """
    [`~mempo_trl.endpoints.CompletionsGenerator`] that samples from an adapter in training.

    Each version of the adapter gets a name and a folder that no other version ever has. So a server without it refuses
    the request, a stale adapter can't answer, and what a server's prefix cache holds of older versions is never read.
    A server that was restarted gets the version again.

    Args:
        urls, eos_token_ids, kwargs:
            As in [`~mempo_trl.endpoints.CompletionsGenerator`].
        folder (`str`):
            Folder in which the versions are written. The servers must see it under the same path.
    """

    def __init__(self, urls: str | list[str], *, eos_token_ids: list[int], folder: str, **kwargs):
        super().__init__(urls, "", eos_token_ids=eos_token_ids, **kwargs)
        self.folder = Path(folder).resolve()
        self._run = uuid.uuid4().hex[:8]  # several runs may share a server
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, rollouts, numbers=None):
        self._locks.clear()  # a lock belongs to its event loop
        return await super().run(rollouts, numbers)

    def next_version(self, step: int) -> str:
        """Name of the version after optimiser step `step`."""
        return f"mempo-{self._run}-{step}"

    async def check(self) -> None:
        """
        Find out whether every server is there and takes adapters at run time.

        Raises:
            GenerationError: If one doesn't; the message names it and the remedy.
        """
        await super().check()
        async with self._open_client() as client:
            for url in self.urls:
                # Nothing can be loaded from this: a server that knows the request says so, another one has no such path.
                response = await client.post(f"{url}/load_lora_adapter", json={"lora_name": "", "lora_path": ""})
                if response.status_code in (404, 405):
                    raise GenerationError(
                        f"{url} takes no adapters at run time (HTTP {response.status_code}). Start it with "
                        "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve … --enable-lora`."
                    )

    async def switch(self, version: str, write: Callable[[Path], None]) -> None:
        """
        Put a version on every server; from then on it is the one that is sampled from.

        Args:
            version (`str`):
                Its name, from [`~AdapterGenerator.next_version`].
            write (`Callable`):
                `write(folder)` writes it.

        Raises:
            GenerationError: If a server doesn't take it; the message names the server and what it said.
        """
        folder, previous = self.folder / version, self.model
        if not folder.exists():
            write(folder)
        async with self._open_client() as self._client:
            await asyncio.gather(*[self._retry(url, self._load, url, version) for url in self.urls])
            self.model = version
            if previous and previous != version:
                await asyncio.gather(*[self._unload(url, previous) for url in self.urls])
        for other in self.folder.iterdir():
            if other.name != version and other.name.startswith((f"mempo-{self._run}-", ".partial-")):
                shutil.rmtree(other, ignore_errors=True)

    async def _load(self, url: str, version: str) -> None:
        body = {"lora_name": version, "lora_path": str(self.folder / version)}
        response = await self._send(url, "load_lora_adapter", body)
        if response.is_success or "already been loaded" in response.text:
            return
        if response.status_code in (502, 503, 504):  # with 500 vLLM answers whatever is wrong with an adapter
            raise Unavailable(f"HTTP {response.status_code}")
        raise GenerationError(
            f"{self._refusal(url, response)} when it was given the adapter in {self.folder / version}. The server must "
            "see this folder under the same path, be started with `--enable-lora` and a `--max-lora-rank` of at least "
            "the adapter's rank, and serve the base model of the training."
        )

    async def _unload(self, url: str, version: str) -> None:
        # It costs a server a little memory, no more: one that doesn't answer here is not waited for.
        try:
            await self._client.post(f"{url}/unload_lora_adapter", json={"lora_name": version}, timeout=30)
        except httpx.RequestError:
            pass

    async def _refused(self, url: str, response: httpx.Response) -> None:
        if response.status_code != 404:
            await super()._refused(url, response)
        async with self._locks[url]:
            await self._load(url, self.model)
        raise Unavailable(f"it did not have the adapter {self.model} any more, and has got it again")

    async def _post(self, url: str, body: dict) -> dict:
        data = await super()._post(url, body)
        if data.get("model") != self.model:
            raise GenerationError(
                f"{url} answered with the model {data.get('model')!r} instead of the adapter {self.model!r}. Whatever "
                "stands between trainer and server must pass the field `model` on."
            )
        return data
