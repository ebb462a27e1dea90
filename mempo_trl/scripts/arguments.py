"""Arguments that several scripts share, and what is made of them."""

import os
from dataclasses import dataclass, field

from accelerate.commands.launch import launch_command_parser
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_quantization_config
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.tool import SearchTool


@dataclass
class RetrievalArguments:
    """
    Where the agent searches.

    Args:
        corpus_path (`str`, *optional*):
            Corpus as JSON Lines with `id`, `title` and `text`, or `id` and `contents`. It is indexed at the start.
        index_path (`str`, *optional*):
            Folder of a saved BM25 index, instead of a corpus.
        retrieval_top_k (`int`, *optional*, defaults to `3`):
            Passages per search.
        max_passage_tokens (`int`, *optional*):
            Tokens to which each passage is cut. `None` keeps it whole.
    """

    corpus_path: str | None = field(
        default=None,
        metadata={"help": "Corpus as JSON Lines with id, title and text, or id and contents. Indexed at the start."},
    )
    index_path: str | None = field(
        default=None, metadata={"help": "Folder of a saved BM25 index, instead of a corpus."}
    )
    retrieval_top_k: int = field(default=3, metadata={"help": "Passages per search."})
    max_passage_tokens: int | None = field(
        default=None, metadata={"help": "Tokens to which each passage is cut. None keeps it whole."}
    )


def make_search_tool(args: RetrievalArguments, tokenizer: PreTrainedTokenizerBase) -> SearchTool:
    """
    The search tool of a run.

    Raises:
        ValueError: If neither or both of `corpus_path` and `index_path` are given.
    """
    if (args.corpus_path is None) == (args.index_path is None):
        raise ValueError(
            f"Give one of `corpus_path` and `index_path`; got corpus_path={args.corpus_path!r} and "
            f"index_path={args.index_path!r}."
        )
    if args.index_path is not None:
        retriever = BM25Retriever.load(args.index_path)
    else:
        retriever = BM25Retriever.from_corpus(args.corpus_path)
    return SearchTool(retriever, args.retrieval_top_k, args.max_passage_tokens, tokenizer)


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
    check_launch_arguments(from_config + from_command_line)
    for args in parsed:
        if isinstance(args, TrainingArguments) and args.hub_token is not None:
            # The arguments are saved and pushed with the model, so the token reaches the client by the environment.
            os.environ["HF_TOKEN"], args.hub_token = args.hub_token, None
    return tuple(parsed)
