"""
`mempo evaluate` with an agent that acts by rule, in a process that can be killed: `scripted_agent.py KILL_AT arguments`.

It searches once or twice, depending on the question, remembers what it found, and answers with the pet that it read of.
At the engine call number KILL_AT the process kills itself as `kill -9` does; 0 is never.
"""

import os
import re
import signal
import sys
from pathlib import Path

from mempo_trl import cli
from mempo_trl.generation import TransformersEngine
from mempo_trl.scripts import evaluate


class ScriptedEngine(TransformersEngine):
    """An engine that writes turns by rule from what it reads; of the model only the tokenizer is used."""

    kill_at = 0
    calls = 0

    def __init__(self, model, tokenizer, max_completion_length: int, temperature: float = 1.0):
        super().__init__(model, tokenizer, max_completion_length, temperature)
        self.tokenizer = tokenizer

    def __call__(self, prompts, idle=False):
        type(self).calls += 1
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self.turn(self.tokenizer.decode(ids)) for ids in prompts], None

    def turn(self, text: str) -> list[int]:
        name = re.findall(r"pet of (\w+)\?", text)[-1]
        found = re.findall(r"The pet is a (\w+)\.", text)
        query = f'<tool_call>{{"name": "search", "arguments": {{"query": "{name}"}}}}</tool_call>'
        if not found:
            turn = query
        elif len(name) % 2 and "<mem>" not in text.split("assistant\n", 1)[1]:
            turn = f"<mem>a {found[-1]}</mem>{query}"
        else:
            turn = f"<mem>a {found[-1]}</mem><answer>{found[-1]}</answer>"
        return self.tokenizer(turn, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]


def make_folder(folder: Path) -> list[str]:
    """Questions and a corpus, and the arguments of `mempo evaluate` that name them."""
    from user_folder import write_lines

    names = [f"Bo{'o' * length}{letter}" for length in range(3) for letter in "abcd"]
    questions = [
        {"id": name, "question": f"What is the pet of {name}?", "golden_answers": ["cat"], "dataset": name[-1]}
        for name in names
    ]
    pets = ["cat", "dog", "cat"]
    corpus = [
        {"id": name, "title": name, "text": f"{name} was born in Rome. The pet is a {pets[k % 3]}."}
        for k, name in enumerate(names)
    ]
    write_lines(folder / "questions.jsonl", questions)
    write_lines(folder / "corpus.jsonl", corpus)
    given = ["--dataset_name", str(folder / "questions.jsonl"), "--corpus_path", str(folder / "corpus.jsonl")]
    given += ["--retrieval_top_k", "1", "--system_prompt", "Search.", "--temperature", "0", "--dtype", "float32"]
    return [*given, "--max_turns", "4", "--max_completion_length", "200", "--batch_size", "5", "--num_samples", "2"]


if __name__ == "__main__":
    evaluate.TransformersEngine = ScriptedEngine
    ScriptedEngine.kill_at = int(sys.argv[1])
    sys.exit(cli.main(["evaluate", *sys.argv[2:]]))
