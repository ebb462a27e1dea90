"""What a model answers without searching, so that questions can be left out for which it needs no search."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase


PROMPT = "Answer the question with a few words and nothing else.\nQuestion: {question}"


def _read_answers(path: Path, model_name: str) -> dict[str, str]:
    """Answers of this model in a file; a last line that was cut off is removed from it."""
    if not path.is_file():
        return {}
    answers, end = {}, 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            record = json.loads(line)
            if record["model"] == model_name:
                answers[record["question"]] = record["answer"]
    os.truncate(path, end)
    return answers


def answer_without_search(
    questions: list[str],
    engine: Callable[[list[list[int]]], tuple[list[list[int]], Any]],
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    path: str | Path,
    batch_size: int = 32,
) -> list[str]:
    """
    Ask a model questions with a short prompt that wants the bare answer.

    The answers of each batch are appended to a file at once. Those that are there already, by the same model, are not
    asked for again, so that a run that was killed goes on.

    Args:
        questions (`list[str]`):
            Questions.
        engine (`Callable`):
            Completes prompts, such as [`~mempo_trl.generation.TransformersEngine`] with temperature 0.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        model_name (`str`):
            Stands beside each answer in the file.
        path (`str` or `Path`):
            JSON Lines file of answers.
        batch_size (`int`, *optional*, defaults to `32`):
            Questions that are answered at the same time.

    Returns:
        `list[str]`: The first line of each answer.
    """
    path = Path(path)
    answers = _read_answers(path, model_name)
    missing = [question for question in dict.fromkeys(questions) if question not in answers]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file, tqdm(total=len(missing), desc="Without search") as bar:
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            completions, _ = engine([_prompt_ids(tokenizer, question) for question in batch])
            for question, ids in zip(batch, completions, strict=True):
                lines = tokenizer.decode(ids, skip_special_tokens=True).strip().splitlines()
                answers[question] = lines[0].strip() if lines else ""
                record = {"model": model_name, "question": question, "answer": answers[question]}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    return [answers[question] for question in questions]


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The prompt in the model's chat form; a model without one completes a text."""
    text = PROMPT.format(question=question)
    if tokenizer.chat_template is None:
        return tokenizer(f"{text}\nAnswer:")["input_ids"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,  # read by the templates of models that think
    )
    return tokenizer(prompt, add_special_tokens=False)["input_ids"]
