"""`mempo collect`: cold-start rollouts from a teacher, from the model itself, or from gold passages."""

import argparse
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel, set_seed
from trl import ModelConfig

from mempo_trl import load_questions
from mempo_trl.data.cold_start import drop_reason, record_reward, scripted_rollout
from mempo_trl.endpoints import ChatGenerator, CompletionsGenerator
from mempo_trl.generation import GenerationError, TransformersEngine, eos_token_ids, model_eos_token_ids
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.provenance import text_hash, tokenizer_hash, weights_stamp
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.runner import FAILED, in_order, play_questions, read_records, row_id
from mempo_trl.scripts.arguments import (
    PlayArguments,
    RetrievalArguments,
    load_agent,
    load_generation_config,
    load_tokenizer,
    make_search_tool,
)
from mempo_trl.scripts.recipes import RecipeParser
from mempo_trl.tools import Toolbox


@dataclass(kw_only=True)
class CollectArguments(PlayArguments):
    """
    Which rollouts to write, and who plays them: a teacher behind `teacher_url`, else the model of
    `model_name_or_path`, else nobody: rollouts are then written by rule from the gold passages of the questions. How
    they are played is in [`~mempo_trl.scripts.arguments.PlayArguments`].

    Args:
        dataset_name (`str`):
            Questions: a JSON, JSONL, Parquet or CSV file, or a data set on the Hub. Without a teacher or model they
            need `supporting_titles`.
        output_file (`str`):
            JSON Lines file with one rollout per line, for `mempo sft`. All that a teacher or model has played is beside
            it in `<name>.all.jsonl`, where a run that was stopped goes on.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"train"`):
            Configuration and split of a data set on the Hub.
        max_questions (`int`, *optional*):
            Only the first so many questions.
        max_rollouts (`int`, *optional*):
            Write at most so many rollouts.
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer of the student, which counts tokens and has the chat template. Defaults to
            `model_name_or_path`.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start anew instead of going on.

        > Teacher

        teacher_url (`list[str]`, *optional*):
            URLs of an OpenAI-compatible endpoint.
        teacher_model (`str`, *optional*):
            Name of the model there.
        teacher_api (`str`, *optional*, defaults to `"chat"`):
            `"chat"` for any model; `"completions"` for a model behind vLLM that has the student's tokenizer.
        teacher_stop (`bool`, *optional*, defaults to `False`):
            With `"chat"`: end turns at `</tool_call>` and `</answer>` with stop sequences.
        teacher_extra_body (`str`, *optional*):
            Further fields of each request as a JSON object, such as `'{"reasoning_effort": "low"}'`. `null` leaves a
            field out.
        api_key_env (`str`, *optional*):
            Environment variable that holds the API key. Defaults to `OPENAI_API_KEY` with `"chat"`.
        retry_seconds (`float`, *optional*, defaults to `300.0`):
            Time within which a request that fails is made again.
        prompt_price (`float`, *optional*), completion_price (`float`, *optional*):
            Price of a million tokens of each kind, for the summary.

        > Filter

        min_reward (`float`, *optional*, defaults to `1.0`):
            Lowest reward of a rollout that is kept: exact match (mean over the objectives) if every turn is well
            formed. 0 keeps wrong answers too.
        require_format (`bool`, *optional*, defaults to `True`):
            Keep only rollouts whose turns are all well formed.
        max_tokens (`int`, *optional*):
            Most tokens of a turn's prompt and completion, which is the length of the longest training sequence.
    """

    dataset_name: str = field(metadata={"help": "Questions: a JSON, JSONL, Parquet or CSV file, or a Hub data set."})
    output_file: str = field(metadata={"help": "JSON Lines file with one rollout per line, for mempo sft."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    max_questions: int | None = field(default=None, metadata={"help": "Only the first so many questions."})
    max_rollouts: int | None = field(default=None, metadata={"help": "Write at most so many rollouts."})
    tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "Tokenizer of the student. Defaults to model_name_or_path."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Start anew instead of going on."})

    teacher_url: list[str] | None = field(
        default=None, metadata={"help": "URLs of an OpenAI-compatible endpoint that plays the rollouts."}
    )
    teacher_model: str | None = field(default=None, metadata={"help": "Name of the model there."})
    teacher_api: str = field(
        default="chat",
        metadata={
            "help": "'chat' for any model; 'completions' for a model behind vLLM that has the student's tokenizer.",
            "choices": ["chat", "completions"],
        },
    )
    teacher_stop: bool = field(
        default=False,
        metadata={"help": "With 'chat': end turns at </tool_call> and </answer> with stop sequences."},
    )
    teacher_extra_body: str | None = field(
        default=None, metadata={"help": "Further fields of each request as a JSON object; null leaves a field out."}
    )
    api_key_env: str | None = field(
        default=None,
        metadata={"help": "Environment variable that holds the API key. Defaults to OPENAI_API_KEY with 'chat'."},
    )
    retry_seconds: float = field(
        default=300.0, metadata={"help": "Time within which a request that fails is made again."}
    )
    prompt_price: float | None = field(
        default=None, metadata={"help": "Price of a million prompt tokens, for the summary."}
    )
    completion_price: float | None = field(
        default=None, metadata={"help": "Price of a million completion tokens, for the summary."}
    )

    min_reward: float = field(
        default=1.0,
        metadata={"help": "Lowest reward of a rollout that is kept: exact match if every turn is well formed."},
    )
    require_format: bool = field(
        default=True, metadata={"help": "Keep only rollouts whose turns are all well formed."}
    )
    max_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens of a turn's prompt and completion (the longest sequence)."}
    )


def main(args: CollectArguments, model_args: ModelConfig, retrieval_args: RetrievalArguments) -> None:
    """Play or write the rollouts, keep the good ones, and say what became of the others."""
    if args.teacher_url is not None and args.teacher_model is None:
        raise ValueError("Give the name of the model at `teacher_url` as `teacher_model`.")
    if args.teacher_url is None and args.teacher_model is not None:
        raise ValueError(f"`teacher_model` is {args.teacher_model!r}; give the URL where it is as `teacher_url`.")
    args.check()
    questions = load_questions(args.dataset_name, args.dataset_config, args.dataset_split)
    questions = questions.to_list()[: args.max_questions]
    student_args = model_args
    if args.tokenizer_name_or_path is not None:
        student_args = ModelConfig(model_name_or_path=args.tokenizer_name_or_path)
    tokenizer = None if student_args.model_name_or_path is None else load_tokenizer(student_args)
    search = make_search_tool(retrieval_args, tokenizer)
    if args.teacher_url is None and model_args.model_name_or_path is None:
        write_scripted(args, questions, search)
        return
    if tokenizer is None:
        raise ValueError(
            "Give the student's tokenizer as `tokenizer_name_or_path`; a teacher's turns are read with it."
        )
    if args.chat_template_path is not None:
        tokenizer.chat_template = load_chat_template(args.chat_template_path)
    model = None
    if args.teacher_url is None:
        model, args.max_prompt_length = load_agent(args, model_args)
        end_ids = model_eos_token_ids(model, tokenizer)
    else:
        end_ids = eos_token_ids(load_generation_config(student_args), tokenizer)
    protocol = Protocol(
        tokenizer,
        Toolbox([search]),
        context=args.context,
        system_prompt=args.system_prompt,
        eos_token_ids=end_ids,
        max_tool_response_length=args.max_tool_response_length,
    )
    settings = {
        "teacher": args.teacher_model or model_args.model_name_or_path,
        "teacher_api": None if model is not None else args.teacher_api,
        "teacher_stop": args.teacher_stop,
        "teacher_extra_body": args.teacher_extra_body,
        "weights": None if model is None else weights_stamp(model_args.model_name_or_path),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "chat_template_hash": text_hash(tokenizer.chat_template),
        "corpus_hash": search.retriever.corpus_hash,
        "temperature": args.temperature,
        "max_completion_length": args.max_completion_length,
        "seed": args.seed,
        "retrieval_top_k": retrieval_args.retrieval_top_k,
        "max_passage_tokens": retrieval_args.max_passage_tokens,
    }
    play_rollouts(args, questions, protocol, model, settings)


def play_rollouts(
    args: CollectArguments, questions: list[dict], protocol: Protocol, model: PreTrainedModel | None, settings: dict
) -> None:
    """Play all questions into `<name>.all.jsonl`, and write what is kept of them, also when the run was stopped."""
    path = Path(args.output_file)
    path = path.with_name(f"{path.stem}.all.jsonl")
    asked = {row_id(row) for row in questions}

    def played() -> list[dict]:
        records = read_records(path) if path.is_file() else []
        return [record for record in records if record["id"] in asked and record["sample"] < args.num_samples]

    before = [] if args.overwrite else [record for record in played() if record["outcome"] != FAILED]
    generator = engine = None
    shared = {"max_completion_length": args.max_completion_length, "temperature": args.temperature}
    if model is not None:
        set_seed(args.seed + len(before))  # else a sample could repeat one of the run that was stopped
        engine = TransformersEngine(model, protocol.tokenizer, **shared)
    else:
        shared |= {"max_concurrency": args.batch_size, "retry_seconds": args.retry_seconds}
        shared |= {"api_key_env": args.api_key_env, "extra_body": _json_object(args.teacher_extra_body)}
        given = (args.teacher_url, args.teacher_model)
        if args.teacher_api == "chat":
            generator = ChatGenerator(*given, protocol=protocol, stop_at_action=args.teacher_stop, **shared)
        else:
            generator = CompletionsGenerator(*given, eos_token_ids=protocol.eos_token_ids, seed=args.seed, **shared)

    stopped = None
    with tqdm(total=len(questions) * args.num_samples, desc="Rollouts") as bar:
        so_far = Counter()

        def on_record(record: dict) -> None:
            so_far["kept" if _reason(record, args) is None else "dropped"] += 1
            so_far["failed"] += record["outcome"] == FAILED
            bar.set_postfix(so_far, refresh=False)
            bar.update()

        for record in before:
            on_record(record)
        try:
            play_questions(
                questions,
                protocol=protocol,
                output_file=path,
                max_turns=args.max_turns,
                generator=generator,
                engine=engine,
                batch_size=args.batch_size,
                num_samples=args.num_samples,
                max_prompt_length=args.max_prompt_length,
                settings=settings,
                overwrite=args.overwrite,
                on_record=on_record,
            )
        except (GenerationError, KeyboardInterrupt) as error:
            stopped = error
    if records := played():
        write_kept(in_order(records, questions), args, path)
    if stopped is not None:
        raise stopped


def _json_object(text: str | None) -> dict:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`teacher_extra_body` is {text!r}, which is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"`teacher_extra_body` is {text!r}; expected a JSON object.")
    return value


def _reason(record: dict, args: CollectArguments) -> str | None:
    return drop_reason(record, args.min_reward, args.require_format, args.max_tokens)


def write_kept(records: list[dict], args: CollectArguments, everything: Path) -> None:
    """Write the rollouts that pass the filter, each with its reward, and print what was dropped and why."""
    counts = Counter()
    kept = []
    for record in records:
        reason = _reason(record, args)
        if reason is None and len(kept) == args.max_rollouts:
            reason = "over `max_rollouts`"
        if reason is None:
            kept.append({**record, "reward": record_reward(record)})
        counts[reason or "kept"] += 1
    write_lines(Path(args.output_file), kept)
    table = Table(title=f"{len(records)} rollouts of {len({record['id'] for record in records})} questions")
    table.add_column("")
    table.add_column("rollouts", justify="right")
    for name, count in sorted(counts.items(), key=lambda item: (item[0] != "kept", -item[1])):
        table.add_row(name if name == "kept" else f"dropped: {name}", str(count))
    Console(markup=False, highlight=False, emoji=False).print(table)
    usage = Counter()
    for record in records:
        usage.update(record.get("usage") or {})
    if usage:
        tokens, prices = (
            (usage["prompt_tokens"], usage["completion_tokens"]),
            (args.prompt_price, args.completion_price),
        )
        cost = ""
        if prices != (None, None):
            cost = f", which cost {sum(n * (price or 0) for n, price in zip(tokens, prices, strict=True)) / 1e6:,.2f}"
        print(f"Tokens of the teacher: {tokens[0]:,} in prompts and {tokens[1]:,} in completions{cost}.")
    print(f"{len(kept)} rollouts in {args.output_file}; all of them in {everything}.")


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON Lines, all or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(unfinished, path)


def write_scripted(args: CollectArguments, questions: list[dict], search: SearchTool) -> None:
    """Write rollouts by rule from gold passages, and say how many questions gave one."""
    if "supporting_titles" not in questions[0]:
        raise ValueError(
            f"{args.dataset_name!r} has no column `supporting_titles`, from which scripted rollouts are made; its "
            f"columns after conversion are {list(questions[0])}. Or name who plays: `teacher_url`, or "
            "`model_name_or_path`."
        )
    rollouts, tried = [], 0
    for row in tqdm(questions, desc="Questions"):
        if len(rollouts) == args.max_rollouts:
            break
        tried += 1
        rollout = scripted_rollout(row, search)
        if rollout is not None:
            rollouts.append(rollout)
    write_lines(Path(args.output_file), rollouts)
    print(
        f"{len(rollouts)} rollouts of {tried} questions in {args.output_file}; the others have a gold passage that is "
        "not found."
    )


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((CollectArguments, ModelConfig, RetrievalArguments), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
