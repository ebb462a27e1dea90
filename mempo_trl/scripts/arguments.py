"""Arguments that several scripts share, and what is made of them."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.commands.launch import launch_command_parser
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_quantization_config
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.cache import CachedRetriever
from mempo_trl.retrieval.document import Retriever
from mempo_trl.retrieval.http import DIALECTS, MAX_BATCH, HTTPRetriever
from mempo_trl.retrieval.index import load_index
from mempo_trl.retrieval.manifest import MANIFEST
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.retrieval.web import WebRetriever


@dataclass
class RetrievalArguments:
    """
    Where the agent searches: exactly one of `corpus_path`, `index_path`, `search_url` and `web_search`.

    Args:
        corpus_path (`str`, *optional*):
            Corpus as JSON Lines with `id`, `title` and `text`, or `id` and `contents`. It is indexed with BM25 at the
            start.
        index_path (`str`, *optional*):
            Folder of an index that `mempo index` built.
        search_url (`str`, *optional*):
            Address of a retrieval server, such as `mempo serve` or that of Search-R1. `${NAME}` in its credentials or
            its query stands for an environment variable.
        search_dialect (`str`, *optional*, defaults to `"auto"`):
            How the server is spoken to: `"search-r1"`, `"skyrl"`, `"flashrag"` or `"asearcher"`. `"auto"` finds out.
        web_search (`str`, *optional*):
            Web search: `"serper"` (its key in `SERPER_API_KEY`), `"tavily"` (`TAVILY_API_KEY`), or the path of a JSON
            template of another engine.
        search_cache_dir (`str`, *optional*):
            Folder that keeps the results of searches, on a local disk; the processes and runs of a machine can share it.
        retrieval_top_k (`int`, *optional*, defaults to `3`):
            Passages per search.
        max_passage_tokens (`int`, *optional*):
            Tokens to which each passage is cut. `None` keeps it whole.
    """

    corpus_path: str | None = field(
        default=None,
        metadata={"help": "Corpus as JSON Lines with id, title and text, or id and contents. Indexed with BM25."},
    )
    index_path: str | None = field(default=None, metadata={"help": "Folder of an index that mempo index built."})
    search_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of a retrieval server, such as mempo serve or that of Search-R1. ${NAME} in its credentials "
            "or its query stands for an environment variable."
        },
    )
    search_dialect: str = field(
        default="auto",
        metadata={"help": "How the server is spoken to. 'auto' finds out.", "choices": ["auto", *DIALECTS]},
    )
    web_search: str | None = field(
        default=None,
        metadata={
            "help": "Web search: 'serper' (its key in SERPER_API_KEY), 'tavily' (TAVILY_API_KEY), or the path of a JSON "
            "template of another engine."
        },
    )
    search_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder that keeps the results of searches, on a local disk; the processes and runs of a machine can "
            "share it."
        },
    )
    retrieval_top_k: int = field(default=3, metadata={"help": "Passages per search."})
    max_passage_tokens: int | None = field(
        default=None, metadata={"help": "Tokens to which each passage is cut. None keeps it whole."}
    )


@dataclass
class PlayArguments:
    """
    How rollouts are played where nothing is trained.

    Args:
        num_samples (`int`, *optional*, defaults to `1`):
            Rollouts per question.
        context (`str`, *optional*, defaults to `"memory"`):
            What a turn sees: `"memory"` or `"full"`.
        max_turns (`int`, *optional*, defaults to `16`):
            Turns after which a rollout without an answer ends.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Tokens after which a turn is cut.
        max_prompt_length (`int`, *optional*):
            Tokens above which the next prompt does not fit. Defaults to what a local model leaves beside
            `max_completion_length`.
        max_tool_response_length (`int`, *optional*):
            Tokens after which a tool response is cut.
        system_prompt (`str`, *optional*), chat_template_path (`str`, *optional*):
            As in `mempo train`.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature; 0 is greedy.
        batch_size (`int`, *optional*, defaults to `64`):
            Rollouts that are played at the same time.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling, and of the bootstrap in an evaluation.
    """

    num_samples: int = field(default=1, metadata={"help": "Rollouts per question."})
    context: str = field(
        default="memory", metadata={"help": "What a turn sees: 'memory' or 'full'.", "choices": ["memory", "full"]}
    )
    max_turns: int = field(default=16, metadata={"help": "Turns after which a rollout without an answer ends."})
    max_completion_length: int = field(default=512, metadata={"help": "Tokens after which a turn is cut."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Tokens above which the next prompt does not fit."}
    )
    max_tool_response_length: int | None = field(
        default=None, metadata={"help": "Tokens after which a tool response is cut."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "As in mempo train."})
    chat_template_path: str | None = field(default=None, metadata={"help": "As in mempo train."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    batch_size: int = field(default=64, metadata={"help": "Rollouts that are played at the same time."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})

    def check(self) -> None:
        """Refuse numbers that nothing can be played with, before anything is loaded."""
        for name in ("num_samples", "batch_size", "max_turns", "max_completion_length"):
            value = vars(self)[name]
            if value < 1:
                raise ValueError(f"`{name}` is {value}, expected at least 1.")


def make_search_tool(args: RetrievalArguments, tokenizer: PreTrainedTokenizerBase) -> SearchTool:
    """
    The search tool of a run.

    Raises:
        ValueError: If not exactly one place to search is given, or if it is none.
    """
    retriever, source = _make_retriever(args)
    # BM25 searches the queries of a list one by one, and the web has a request for each.
    max_batch = 1 if isinstance(retriever, (BM25Retriever, WebRetriever)) else MAX_BATCH
    if args.search_cache_dir is not None:
        retriever = CachedRetriever(retriever, args.search_cache_dir, source)
    return SearchTool(retriever, args.retrieval_top_k, args.max_passage_tokens, tokenizer, max_batch)


def _make_retriever(args: RetrievalArguments) -> tuple[Retriever, str]:
    """The retriever, and what tells its results from those of others in a cache."""
    if args.search_url is not None and re.search(r"//[^/]*:(?!\$\{)[^/]*@", args.search_url):
        raise ValueError(
            "`search_url` holds a password, which would be saved with the arguments; put it into an environment variable "
            "and write ${NAME} in its place."
        )
    places = ("corpus_path", "index_path", "search_url", "web_search")
    given = [f"{name}={vars(args)[name]!r}" for name in places if vars(args)[name] is not None]
    if len(given) != 1:
        raise ValueError(
            f"Give one of `corpus_path`, `index_path`, `search_url` and `web_search`; got {' and '.join(given) or 'none'}."
        )
    if args.search_url is None and args.search_dialect != "auto":
        raise ValueError(f"`search_dialect` is {args.search_dialect!r} but there is no `search_url` that it is for.")
    if args.corpus_path is not None:
        return BM25Retriever.from_corpus(args.corpus_path), "bm25"
    if args.index_path is not None:
        retriever = load_index(args.index_path)
        manifests = sorted(Path(args.index_path).rglob(MANIFEST))  # the settings of the index and of its parts
        return retriever, "".join(manifest.read_text(encoding="utf-8") for manifest in manifests)
    if args.search_url is not None:
        retriever = HTTPRetriever(args.search_url, args.search_dialect)
        return retriever, retriever.url
    retriever = WebRetriever(args.web_search)
    return retriever, json.dumps(retriever.template, sort_keys=True)


def is_adapter(model_args: ModelConfig) -> bool:
    """Whether `model_name_or_path` is a PEFT adapter, in a folder or on the Hub."""
    path = find_adapter_config_file(model_args.model_name_or_path, revision=model_args.model_revision)
    return path is not None


def load_tokenizer(model_args: ModelConfig, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of `model_name_or_path`, a model or an adapter."""
    return AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        padding_side="left",
        trust_remote_code=trust_remote_code,
    )


def load_generation_config(model_args: ModelConfig) -> GenerationConfig:
    """The generation config beside a tokenizer, an empty one where there is none."""
    try:
        return GenerationConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    except OSError:
        return GenerationConfig()


def load_model(model_args: ModelConfig, trainable: bool, trust_remote_code: bool = False) -> PreTrainedModel:
    """
    Load `model_name_or_path`: a causal language model, or an adapter with its base model.

    Args:
        model_args ([`~trl.ModelConfig`]):
            Which model, in which dtype.
        trainable (`bool`):
            Whether an adapter will be trained further.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the model may bring its own code.

    Returns:
        [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]
    """
    kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype or "auto",
        quantization_config=get_quantization_config(model_args),
        trust_remote_code=trust_remote_code,
    )
    if is_adapter(model_args):
        kwargs["is_trainable"] = trainable
        return AutoPeftModelForCausalLM.from_pretrained(model_args.model_name_or_path, **kwargs)
    return AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **kwargs)


def load_agent(args: PlayArguments, model_args: ModelConfig) -> tuple[PreTrainedModel, int | None]:
    """
    The model in this process, to play with.

    Args:
        args ([`PlayArguments`]):
            With the lengths of a turn and of its prompt.
        model_args ([`~trl.ModelConfig`]):
            A model or an adapter.

    Returns:
        `tuple[PreTrainedModel, int | None]`: The model, and the longest prompt that it takes.

    Raises:
        ValueError: If a turn fills the model's whole context.
    """
    model = load_model(model_args, trainable=False).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    max_length = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if max_length is None or args.max_prompt_length is not None:
        return model, args.max_prompt_length
    if args.max_completion_length >= max_length:
        raise ValueError(
            f"`max_completion_length` is {args.max_completion_length}, but the model takes {max_length} tokens in all; "
            "lower it."
        )
    return model, max_length - args.max_completion_length


def check_launch_arguments(arguments: list[str]) -> None:
    """
    Check what a script's parser left over: it has to be for `accelerate launch`.

    Args:
        arguments (`list[str]`):
            Left over arguments of the command line or of a recipe.

    Raises:
        ValueError: If an argument is unknown to `accelerate launch` as well, or is a value without a name.
    """
    known = {"--accelerate_config", *launch_command_parser()._option_string_actions}
    unknown = [name for name in arguments if name.startswith("--") and name.split("=")[0] not in known]
    if unknown:
        raise ValueError(
            f"Unknown argument {', '.join(unknown)}: neither the script nor `accelerate launch` has it. `--help` lists "
            "the script's."
        )
    launched = launch_command_parser().parse_args([*resolve_accelerate_config_argument(arguments), "script"])
    if launched.training_script != "script":
        raise ValueError(
            f"The value {launched.training_script!r} belongs to no argument. A recipe is given as `--config FILE.yaml`."
        )


def parse_launched(parser: TrlParser) -> tuple:
    """Arguments of a script under `accelerate launch`, whose own arguments a recipe may hold as well."""
    *parsed, from_config, from_command_line = parser.parse_args_and_config(
        return_remaining_strings=True, separate_remaining_strings=True
    )
    try:
        check_launch_arguments(from_config + from_command_line)
    except ValueError as error:
        parser.error(str(error))
    for args in parsed:
        if isinstance(args, TrainingArguments) and args.hub_token is not None:
            # The arguments are saved and pushed with the model, so the token reaches the client by the environment.
            os.environ["HF_TOKEN"], args.hub_token = args.hub_token, None
    return tuple(parsed)
