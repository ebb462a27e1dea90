"""
The built-in world: a village of people, small enough that a tiny model learns to search it in minutes on a CPU.

Everything is generated from a seed and nothing is downloaded. `python -m mempo_trl.data.village --output_dir village`
writes a corpus, questions, scripted rollouts for a cold start, and an untrained model with its tokenizer.
"""

import argparse
import json
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..retrieval.bm25 import BM25Retriever
from ..retrieval.document import Document
from ..retrieval.tool import SearchTool
from ..scripts.recipes import RecipeParser
from .village_model import build_model, build_tokenizer


logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Answer by searching."
"""Short system prompt that suits the tiny model; the tokenizer is trained on it too."""

NAMES = (
    "Ada Adam Alan Albert Alma Andre Anna Anton Arno Bea Ben Berta Bill Bob Boris Carl Carla Clara Claude Cora Cyril "
    "Dan David Della Dora Doris Edgar Edith Egon Ella Elmer Elsa Emil Emma Enzo Eric Erna Eva Ezra Felix Flora Frida "
    "Fritz Gina Gloria Greta Gus Hanna Hans Heidi Helga Henry Hilda Hugo Ida Igor Ines Inga Irma Isaac Ivan Jakob Jane "
    "Jonas Joel Judy Julia Karin Kate Klaus Kurt Lars Laura Lea Leon Linda Lisa Lotte Lucas Luis Lydia Mara Marco Marta "
    "Max Mia Milo Mona Moritz Nadia Nina Noah Nora Olga Oscar Otto Paul Paula Pedro Petra Ralf Rita Rosa Rudi Ruth Sara "
    "Selma Simon Sofia Sven Tara Theo Tina Tom Ulla Uwe Vera Victor Wanda Willi Xenia Yara Yves Zeno Zora"
).split()
"""First names that are no English words and no values, so that a search for a name finds the person."""

ATTRIBUTES = {
    "job": "baker barber doctor farmer lawyer miller nurse painter pilot potter sailor singer tailor teacher".split(),
    "town": "Athens Berlin Cairo Delhi Dublin Lima Lisbon Madrid Oslo Paris Prague Rome Tokyo Vienna".split(),
    "pet": "cat dog duck frog goat hamster hen horse lizard parrot pony rabbit snake turtle".split(),
    "color": "beige black blue brown gold gray green orange pink purple red silver white yellow".split(),
    "drink": "beer cider cocoa coffee cola juice lemonade milk punch rum soda tea water wine".split(),
}
"""The attributes of a person and the values of each; no value belongs to two attributes."""

RELATIONS = ("friend", "boss", "neighbor")
"""The relations of a person, each to one other person."""

SPLITS = {"train": 0.7, "dev": 0.1, "test": 0.2}
"""The splits and the share of all objectives that each of them owns."""

_OBJECTIVE = re.compile(r"What is the (\w+) of (?:the (\w+) of )?(\w+)\?")


@dataclass(frozen=True)
class Objective:
    """
    One question with one answer.

    Args:
        name (`str`):
            The person it starts from.
        attribute (`str`):
            What is asked for, a key of `ATTRIBUTES`.
        relation (`str`, *optional*):
            One of `RELATIONS` for a two-hop chain: the attribute is then that of the related person.
    """

    name: str
    attribute: str
    relation: str | None = None

    @property
    def text(self) -> str:
        """The question in words."""
        chain = f"the {self.relation} of {self.name}" if self.relation else self.name
        return f"What is the {self.attribute} of {chain}?"

    @property
    def slots(self) -> list[str]:
        """What to look up, in this order; one search each."""
        return [self.relation, self.attribute] if self.relation else [self.attribute]


def parse_objectives(question: str) -> list[Objective]:
    """
    Read the objectives back from a question.

    Args:
        question (`str`):
            Objectives joined by `"; "`, as in the rows of [`Village.questions`].

    Returns:
        `list[Objective]`
    """
    objectives = []
    for text in question.split("; "):
        match = _OBJECTIVE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no question about the village; ask like `What is the pet of Anna?`.")
        objectives.append(Objective(match[3], match[1], match[2]))
    return objectives


@dataclass
class Village:
    """
    People with attributes and relations; use [`Village.generate`] to make one.

    Args:
        seed (`int`):
            Seed that decided who lives here and which objectives belong to which split.
        people (`dict[str, dict[str, str]]`):
            For each name the value of each attribute and the name behind each relation.

    Example:

    ```python
    >>> village = Village.generate(seed=0)
    >>> row = village.questions("train", num_rows=1, num_objectives=[2])[0]
    >>> rollout = village.expert_rollout(row, random.Random(0), search=SearchTool(retriever))
    ```
    """

    seed: int
    people: dict[str, dict[str, str]]

    @classmethod
    def generate(cls, seed: int = 0, num_people: int = 60, facts_seed: int | None = None) -> "Village":
        """
        Generate a village.

        Args:
            seed (`int`, *optional*, defaults to `0`):
                Decides the names, the splits and, unless `facts_seed` is given, the facts.
            num_people (`int`, *optional*, defaults to `60`):
                How many people live in the village.
            facts_seed (`int`, *optional*):
                Draws other facts for the same people and the same splits: a practice village. A model cold-started on
                rollouts from several of them has to read what the search returned instead of knowing it by heart.

        Returns:
            [`Village`]
        """
        most = len(NAMES)
        if not len(RELATIONS) < num_people <= most:
            raise ValueError(f"got `num_people={num_people}`, expected {len(RELATIONS) + 1} to {most}.")
        names = sorted(random.Random(f"names {seed}").sample(NAMES, num_people))
        rng = random.Random(f"facts {seed}" if facts_seed is None else f"facts {seed} {facts_seed}")
        people = {}
        for name in names:
            facts = {attribute: rng.choice(values) for attribute, values in ATTRIBUTES.items()}
            others = rng.sample([other for other in names if other != name], len(RELATIONS))
            people[name] = facts | dict(zip(RELATIONS, others, strict=True))
        return cls(seed, people)

    def passage(self, name: str) -> str:
        """The passage about a person, with all of the person's facts."""
        *attributes, last_attribute = (f"the {key} {self.people[name][key]}" for key in ATTRIBUTES)
        *relations, last_relation = (f"the {key} {self.people[name][key]}" for key in RELATIONS)
        return (
            f"{name} has {', '.join(attributes)} and {last_attribute}. "
            f"{name} has {', '.join(relations)} and {last_relation}."
        )

    def corpus(self) -> list[dict]:
        """One passage per person: `{"id", "title", "text"}`, the name being the title."""
        return [{"id": str(i), "title": name, "text": self.passage(name)} for i, name in enumerate(self.people)]

    def texts(self) -> list[str]:
        """Every word and phrase that prompts, tool responses and turns in this village are made of, for a tokenizer."""
        words = [value for values in ATTRIBUTES.values() for value in values]
        passages = [f"Doc 1(Title: {row['title']}) {row['text']}\n" for row in self.corpus()]
        questions = "; ".join([Objective(next(iter(self.people)), key, RELATIONS[0]).text for key in ATTRIBUTES])
        return [SYSTEM_PROMPT, "done", *words, *passages, questions]

    def answer(self, objective: Objective) -> str:
        """The true answer of an objective."""
        name = self.people[objective.name][objective.relation] if objective.relation else objective.name
        return self.people[name][objective.attribute]

    def objectives(self, split: str, hops: int) -> list[Objective]:
        """
        All objectives of a split. Splits share none, so held-out questions are new in each of their parts.

        Args:
            split (`str`):
                `"train"`, `"dev"` or `"test"`.
            hops (`int`):
                1 for the attributes of a person, 2 for those of a related person.

        Returns:
            `list[Objective]`
        """
        if split not in SPLITS:
            raise ValueError(f"got `split={split!r}`, expected one of {', '.join(SPLITS)}.")
        relations = RELATIONS if hops == 2 else (None,)
        pool = [Objective(n, attribute, r) for n in self.people for attribute in ATTRIBUTES for r in relations]
        random.Random(f"splits {self.seed} {hops}").shuffle(pool)
        start = 0.0
        for name, share in SPLITS.items():
            if name == split:
                break
            start += share
        return pool[round(start * len(pool)) : round((start + SPLITS[split]) * len(pool))]

    def questions(
        self, split: str, num_rows: int, num_objectives: list[int], seed: int = 0, two_hop_frac: float = 0.4
    ) -> list[dict]:
        """
        Draw distinct questions; the objectives of one question start from different people.

        Args:
            split (`str`):
                `"train"`, `"dev"` or `"test"`.
            num_rows (`int`):
                How many questions.
            num_objectives (`list[int]`):
                The numbers of objectives, each equally often.
            seed (`int`, *optional*, defaults to `0`):
                Another seed draws other questions from the same split.
            two_hop_frac (`float`, *optional*, defaults to `0.4`):
                Share of the objectives that are two-hop chains.

        Returns:
            `list[dict]`: rows with `id`, `question`, `golden_answers` (objectives × aliases), `dataset`,
            `num_objectives` and `hops` (one number per objective).

        Raises:
            ValueError: If the split has too few different questions.
        """
        rng = random.Random(f"questions {self.seed} {split} {seed}")
        pools = {hops: self.objectives(split, hops) for hops in (1, 2)}
        rows, seen = [], set()
        while len(rows) < num_rows:
            for _ in range(1000):
                objectives = self._draw(rng, pools, num_objectives[len(rows) % len(num_objectives)], two_hop_frac)
                question = "; ".join(objective.text for objective in objectives)
                if question not in seen:
                    break
            else:
                raise ValueError(
                    f"found only {len(rows)} of {num_rows} different {split} questions with `num_objectives="
                    f"{num_objectives}`; ask for fewer rows, more objectives or a village of more than "
                    f"{len(self.people)} people."
                )
            seen.add(question)
            rows.append(
                {
                    "id": f"village-{split}-{seed}-{len(rows)}",
                    "question": question,
                    "golden_answers": [[self.answer(objective)] for objective in objectives],
                    "dataset": "village",
                    "num_objectives": len(objectives),
                    "hops": [len(objective.slots) for objective in objectives],
                }
            )
        return rows

    def _draw(self, rng: random.Random, pools: dict[int, list], count: int, two_hop_frac: float) -> list[Objective]:
        """`count` objectives that start from different people."""
        if not 1 <= count <= len(self.people) // 2:
            raise ValueError(f"got {count} objectives, expected 1 to {len(self.people) // 2} (half of the people).")
        objectives = []
        while len(objectives) < count:
            objective = rng.choice(pools[2 if rng.random() < two_hop_frac else 1])
            if all(objective.name != other.name for other in objectives):
                objectives.append(objective)
        return objectives

    def expert_rollout(
        self, row: dict, rng: random.Random, search: Callable[[str], str], memory_mistake_rate: float = 0.0
    ) -> dict:
        """
        Script the rollout of an expert that works through the objectives one by one.

        Each memory lists the objectives begun so far as paths, such as `Anna pet cat; Bob friend Carl drink`: the pet
        of Anna is a cat, the friend of Bob is Carl, and Carl's drink is pending. The expert acts on its memory alone: a
        wrong name is searched, a wrong value is answered, and for a value that the memory lost it guesses.

        Args:
            row (`dict`):
                A row of [`Village.questions`].
            rng (`random.Random`):
                Source of the mistakes and guesses.
            search (`Callable`):
                Returns the tool response to a query, for example a `SearchTool`.
            memory_mistake_rate (`float`, *optional*, defaults to `0.0`):
                Probability, for each memory that has something to keep, that the last finding of one of its objectives
                goes wrong: a value is dropped with its path or replaced by another value of the attribute, equally
                often; the name of a related person is always replaced.

        Returns:
            `dict`: `id`, `question`, `golden_answers`, `outcome`, `answer` (right or wrong) and `turns`, a list of
            `{"completion", "response", "outcome"}`.
        """
        objectives = parse_objectives(row["question"])
        memory: dict[Objective, list[str]] = {}  # what the next memory says; dropped objectives are missing
        turns: list[dict] = []
        for objective in objectives:
            path = memory[objective] = [objective.name]
            for slot in objective.slots:
                name = path[-1]
                path.append(slot)
                call = json.dumps({"name": "search", "arguments": {"query": name}})
                action = f"<think>{name} {slot}</think><tool_call>{call}</tool_call>"
                turns.append(
                    {
                        "completion": (_render_memory(memory) if turns else "") + action,
                        "response": search(name),
                        "outcome": "tool_call",
                    }
                )
                value = self.people[name][slot]
                if value not in turns[-1]["response"]:
                    raise ValueError(
                        f"the search for {name!r} returned {turns[-1]['response']!r} without the {slot} {value!r}; "
                        f"`search` must search the corpus of this village."
                    )
                path.append(value)
                if rng.random() < memory_mistake_rate:
                    self._spoil(memory, rng)
        answers = [
            memory[objective][-1] if objective in memory else rng.choice(ATTRIBUTES[objective.attribute])
            for objective in objectives
        ]
        answer = "; ".join(answers)
        completion = f"{_render_memory(memory)}<think>done</think><answer>{answer}</answer>"
        turns.append({"completion": completion, "response": None, "outcome": "answer"})
        shared = {key: row[key] for key in ("id", "question", "golden_answers")}
        return shared | {"outcome": "answer", "answer": answer, "turns": turns}

    def _spoil(self, memory: dict[Objective, list[str]], rng: random.Random) -> None:
        """Make one mistake in what the memory is about to say."""
        if not memory:
            return
        objective = rng.choice(list(memory))
        path = memory[objective]
        if path[-1] in self.people:
            path[-1] = rng.choice([name for name in self.people if name != path[-1]])
        elif rng.random() < 0.5:
            del memory[objective]
        else:
            path[-1] = rng.choice([value for value in ATTRIBUTES[objective.attribute] if value != path[-1]])


def _render_memory(memory: dict[Objective, list[str]]) -> str:
    """The memory block of a turn."""
    return f"<mem>{'; '.join(' '.join(path) for path in memory.values())}</mem>"


@dataclass
class VillageArguments:
    r"""
    Arguments of the village generator.

    Args:
        output_dir (`str`):
            Folder for `corpus.jsonl`, `train.jsonl`, `test.jsonl`, `rollouts.jsonl` and `model/`.

        > World

        seed (`int`, *optional*, defaults to `0`):
            Seed of everything that is drawn.
        num_people (`int`, *optional*, defaults to `60`):
            How many people live in the village.

        > Questions

        num_train (`int`, *optional*, defaults to `500`):
            Training questions.
        num_test (`int`, *optional*, defaults to `200`):
            Held-out questions.
        objectives (`list[int]`, *optional*, defaults to `[1, 2, 3]`):
            Numbers of objectives per question, each equally often.
        two_hop_frac (`float`, *optional*, defaults to `0.4`):
            Share of the objectives that are two-hop chains.

        > Scripted rollouts

        retrieval_top_k (`int`, *optional*, defaults to `1`):
            Passages per search.
        num_rollouts (`int`, *optional*, defaults to `2000`):
            Scripted rollouts for the cold start.
        rollout_objectives (`list[int]`, *optional*, defaults to `[1, 2, 3]`):
            Numbers of objectives per scripted rollout, each equally often.
        num_practice_villages (`int`, *optional*, defaults to `20`):
            The rollouts are spread over this many villages with the same people and other facts, so that the model
            learns to read what the search returns.
        memory_mistake_rate (`float`, *optional*, defaults to `0.0`):
            Probability of a deliberate mistake in each memory.
    """

    output_dir: str = field(
        metadata={"help": "Folder for `corpus.jsonl`, `train.jsonl`, `test.jsonl`, `rollouts.jsonl` and `model/`."}
    )

    # World
    seed: int = field(default=0, metadata={"help": "Seed of everything that is drawn."})
    num_people: int = field(default=60, metadata={"help": "How many people live in the village."})

    # Questions
    num_train: int = field(default=500, metadata={"help": "Training questions."})
    num_test: int = field(default=200, metadata={"help": "Held-out questions."})
    objectives: list[int] = field(
        default_factory=lambda: [1, 2, 3],
        metadata={"help": "Numbers of objectives per question, each equally often."},
    )
    two_hop_frac: float = field(default=0.4, metadata={"help": "Share of the objectives that are two-hop chains."})

    # Scripted rollouts
    retrieval_top_k: int = field(default=1, metadata={"help": "Passages per search."})
    num_rollouts: int = field(default=2000, metadata={"help": "Scripted rollouts for the cold start."})
    rollout_objectives: list[int] = field(
        default_factory=lambda: [1, 2, 3],
        metadata={"help": "Numbers of objectives per scripted rollout, each equally often."},
    )
    num_practice_villages: int = field(
        default=20,
        metadata={
            "help": "The rollouts are spread over this many villages with the same people and other facts, so that the "
            "model learns to read what the search returns."
        },
    )
    memory_mistake_rate: float = field(
        default=0.0, metadata={"help": "Probability of a deliberate mistake in each memory."}
    )


def scripted_rollouts(args: VillageArguments) -> list[dict]:
    """
    Script rollouts in practice villages, on training objectives only.

    Args:
        args ([`VillageArguments`]):
            How many, of what kind, and with how many mistakes.

    Returns:
        `list[dict]`: rollouts as from [`Village.expert_rollout`], shuffled.
    """
    rng = random.Random(f"rollouts {args.seed}")
    rollouts: list[dict] = []
    for i in range(args.num_practice_villages):
        village = Village.generate(args.seed, args.num_people, facts_seed=i)
        count = (args.num_rollouts - len(rollouts)) // (args.num_practice_villages - i)
        rows = village.questions("train", count, args.rollout_objectives, seed=i + 1, two_hop_frac=args.two_hop_frac)
        search = SearchTool(
            BM25Retriever.from_corpus(Document(**passage) for passage in village.corpus()), top_k=args.retrieval_top_k
        )
        rollouts += [village.expert_rollout(row, rng, search, args.memory_mistake_rate) for row in rows]
    rng.shuffle(rollouts)
    return rollouts


def main(args: VillageArguments) -> None:
    """Write the village, its questions, the scripted rollouts, and the untrained model with its tokenizer."""
    village = Village.generate(args.seed, args.num_people)
    files = {"corpus": village.corpus(), "rollouts": scripted_rollouts(args)}
    for split, num_rows in (("train", args.num_train), ("test", args.num_test)):
        files[split] = village.questions(split, num_rows, args.objectives, two_hop_frac=args.two_hop_frac)

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    tokenizer = build_tokenizer(village.texts())
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=args.seed).save_pretrained(folder / "model")
    logger.info("Wrote %s to %s.", ", ".join(f"{len(rows)} {name} rows" for name, rows in files.items()), folder)


def make_parser() -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((VillageArguments,))


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
