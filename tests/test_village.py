"""The built-in village: its facts, questions, scripted rollouts, tokenizer and tiny model."""

import json
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from trl import TrlParser

from mempo_trl.data import village as module
from mempo_trl.data.village import ATTRIBUTES, NAMES, RELATIONS, SPLITS, Village, VillageArguments, parse_objectives
from mempo_trl.data.village_model import CALL_TOKENS, TAG_TOKENS, build_model, build_tokenizer
from mempo_trl.parsing import parse_turn
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.tool import SearchTool


VILLAGE = Village.generate(seed=3)
TOKENIZER = build_tokenizer(VILLAGE.texts())


def make_search(village: Village, top_k: int = 1) -> SearchTool:
    return SearchTool(BM25Retriever.from_corpus(Document(**row) for row in village.corpus()), top_k=top_k)


def read_facts(passage: str) -> dict[str, str]:
    """The facts of a passage, read from its text alone."""
    return dict(re.findall(r"the (\w+) (\w+)", passage))


def walk(question: str, passages: dict[str, str]) -> list[str]:
    """Answers found by reading passages, without the village's own code."""
    answers = []
    for text in question.split("; "):
        attribute, chain = re.fullmatch(r"What is the (\w+) of (.+)\?", text).groups()
        name = chain.split()[-1]
        if chain.startswith("the "):
            name = read_facts(passages[name])[chain.split()[1]]
        answers.append(read_facts(passages[name])[attribute])
    return answers


def memory_paths(completion: str) -> list[list[str]]:
    """The entries of a memory block, as lists of words."""
    text = re.match(r"<mem>(.*?)</mem>", completion)[1]
    return [entry.split() for entry in text.split("; ")] if text else []


def answer_from_memory(question: str, completion: str) -> list[str | None]:
    """For each objective the last word of its path in the memory, `None` where it is missing."""
    paths = {path[0]: path for path in memory_paths(completion)}
    names = [text.rstrip("?").split()[-1] for text in question.split("; ")]
    return [paths[name][-1] if name in paths else None for name in names]


def test_words_are_distinct():
    """No value has two meanings, so that a word alone says what it is."""
    words = [word.lower() for values in [NAMES, RELATIONS, ATTRIBUTES, *ATTRIBUTES.values()] for word in values]
    assert len(words) == len(set(words))
    assert all(word.isalpha() for word in words)
    assert {len(values) for values in ATTRIBUTES.values()} == {14}


def test_same_seed_same_village():
    """Everything follows from the seed, and another seed gives another village."""
    search = make_search(VILLAGE)
    again = Village.generate(seed=3)
    assert again == VILLAGE
    for draw in (
        lambda v, s: v.corpus(),
        lambda v, s: v.questions("train", 20, [1, 2, 3], seed=s),
        lambda v, s: v.expert_rollout(v.questions("train", 1, [3])[0], random.Random(s), search, 0.5),
    ):
        assert draw(again, 1) == draw(VILLAGE, 1)
    assert Village.generate(seed=4).people != VILLAGE.people
    assert VILLAGE.questions("train", 20, [2], seed=0) != VILLAGE.questions("train", 20, [2], seed=1)


def test_relations_lead_to_other_people():
    """Nobody is their own friend, and the three relations of a person are three people."""
    for name, facts in VILLAGE.people.items():
        others = {facts[relation] for relation in RELATIONS}
        assert len(others) == len(RELATIONS) and name not in others and others <= VILLAGE.people.keys()


def test_practice_village_keeps_people_and_splits():
    """A practice village has other facts about the same people, and its training objectives are the same ones."""
    practice = Village.generate(seed=3, facts_seed=0)
    assert practice.people.keys() == VILLAGE.people.keys() and practice.people != VILLAGE.people
    for split in SPLITS:
        for hops in (1, 2):
            assert practice.objectives(split, hops) == VILLAGE.objectives(split, hops)


def test_search_for_a_name_finds_the_person():
    """BM25 ranks the person's own passage first, however many others mention the name."""
    search = make_search(VILLAGE, top_k=5)
    for row in VILLAGE.corpus():
        assert row.keys() == {"id", "title", "text"}
        assert search.search(row["title"])[0].title == row["title"]


@pytest.mark.parametrize("hops", [1, 2])
def test_splits_share_no_objective(hops):
    """The splits divide all objectives among them: each in exactly one."""
    texts = [objective.text for split in SPLITS for objective in VILLAGE.objectives(split, hops)]
    assert (
        len(texts) == len(set(texts)) == len(VILLAGE.people) * len(ATTRIBUTES) * (len(RELATIONS) if hops == 2 else 1)
    )


def test_questions_of_splits_are_disjoint():
    """No part of a held-out question occurs in a training question, and no question occurs twice."""
    parts = {}
    for split in SPLITS:
        questions = [row["question"] for row in VILLAGE.questions(split, 80, [1, 2, 3, 6])]
        assert len(set(questions)) == len(questions) == 80
        parts[split] = {part for question in questions for part in question.split("; ")}
    assert not parts["train"] & parts["test"]
    assert not parts["train"] & parts["dev"]
    assert not parts["dev"] & parts["test"]


def test_question_rows():
    """Rows have the columns of the project; numbers of objectives take turns; starting people are distinct."""
    rows = VILLAGE.questions("dev", 30, [1, 4], two_hop_frac=0.5)
    assert [row["num_objectives"] for row in rows] == [1, 4] * 15
    for row in rows:
        assert row.keys() == {"id", "question", "golden_answers", "dataset", "num_objectives", "hops"}
        objectives = parse_objectives(row["question"])
        assert len({objective.name for objective in objectives}) == len(objectives) == row["num_objectives"]
        assert row["hops"] == [2 if "of the" in part else 1 for part in row["question"].split("; ")]
        assert row["dataset"] == "village"
    assert {hop for row in rows for hop in row["hops"]} == {1, 2}


@pytest.mark.parametrize("two_hop_frac", [0.0, 1.0])
def test_two_hop_frac(two_hop_frac):
    """The extremes give only direct questions, or only chains."""
    rows = VILLAGE.questions("train", 20, [2], two_hop_frac=two_hop_frac)
    assert {hop for row in rows for hop in row["hops"]} == {1 + two_hop_frac}


def test_answers_follow_from_the_corpus():
    """Reading the passages alone gives the golden answers."""
    passages = {row["title"]: row["text"] for row in VILLAGE.corpus()}
    for row in VILLAGE.questions("test", 100, [1, 2, 3, 6]):
        assert [[answer] for answer in walk(row["question"], passages)] == row["golden_answers"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Village.generate(num_people=3), "num_people=3"),
        (lambda: Village.generate(num_people=1000), "num_people=1000"),
        (lambda: VILLAGE.objectives("held-out", 1), "held-out"),
        (lambda: VILLAGE.questions("train", 5, [0]), "0 objectives"),
        (lambda: VILLAGE.questions("train", 5, [31]), "31 objectives"),
        (lambda: VILLAGE.questions("dev", 31, [1], two_hop_frac=0.0), "found only 30 of 31"),
        (lambda: parse_objectives("Who is Anna?"), "Who is Anna"),
    ],
)
def test_impossible_requests_name_the_value(call, message):
    """What can't be done is refused, quoting what was given. 60 people × 5 attributes × 0.1 = 30 direct dev objectives."""
    with pytest.raises(ValueError, match=message):
        call()


def test_search_of_another_corpus_is_refused():
    """A response without the fact that the expert claims to read from it would teach inventing."""
    other = make_search(Village.generate(seed=3, facts_seed=1))
    rows = VILLAGE.questions("train", 20, [2])
    with pytest.raises(ValueError, match="must search the corpus"):
        for row in rows:
            VILLAGE.expert_rollout(row, random.Random(0), other)


@pytest.mark.parametrize("top_k", [1, 3])
def test_expert_without_mistakes(top_k):
    """Every turn is well formed, the answer is right, and it can be produced from the last memory alone."""
    search = make_search(VILLAGE, top_k)
    for row in VILLAGE.questions("train", 60, [1, 2, 3, 6]):
        rollout = VILLAGE.expert_rollout(row, random.Random(0), search)
        golden = [aliases[0] for aliases in row["golden_answers"]]
        assert rollout.keys() == {"id", "question", "golden_answers", "outcome", "answer", "turns"}
        assert rollout["answer"] == "; ".join(golden) and rollout["outcome"] == "answer"
        assert len(rollout["turns"]) == sum(row["hops"]) + 1
        assert answer_from_memory(row["question"], rollout["turns"][-1]["completion"]) == golden
        for i, turn in enumerate(rollout["turns"]):
            parsed = parse_turn(turn["completion"], lambda name, arguments: None)
            assert parsed.outcome == turn["outcome"] and parsed.well_formed(memory_required=i > 0)
            assert (parsed.memory is None) == (i == 0)
            if turn["outcome"] == "tool_call":
                assert turn["response"] == search(parsed.arguments["query"])
            else:
                assert turn["response"] is None and parsed.answer == rollout["answer"]


def test_turns_of_an_expert():
    """One rollout as text: a direct objective, then a chain whose second search goes to the person found first."""
    people = {
        name: dict.fromkeys(ATTRIBUTES, "x") | dict.fromkeys(RELATIONS, "Bob") for name in ("Anna", "Bob", "Eva")
    }
    people["Anna"]["pet"], people["Bob"]["drink"] = "cat", "tea"
    village = Village(0, people)
    row = {"id": "0", "question": "What is the pet of Anna?; What is the drink of the friend of Eva?"}
    row["golden_answers"] = [["cat"], ["tea"]]
    rollout = village.expert_rollout(row, random.Random(0), village.passage)
    call = '<tool_call>{{"name": "search", "arguments": {{"query": "{}"}}}}</tool_call>'.format
    assert [turn["completion"] for turn in rollout["turns"]] == [
        "<think>Anna pet</think>" + call("Anna"),
        "<mem>Anna pet cat; Eva friend</mem><think>Eva friend</think>" + call("Eva"),
        "<mem>Anna pet cat; Eva friend Bob drink</mem><think>Bob drink</think>" + call("Bob"),
        "<mem>Anna pet cat; Eva friend Bob drink tea</mem><think>done</think><answer>cat; tea</answer>",
    ]


def test_mistakes_come_at_the_stated_rate():
    """
    Each memory goes wrong with the stated probability, and what follows agrees with the wrong memory.

    A memory is checked against the one before it and the response between them: it is right if nothing was lost or
    changed and the newest finding is the one in the passage. With n memories and rate p the count is binomial, and five
    standard deviations are sqrt(25 n p (1 - p)).
    """
    rate, search, rng = 0.3, make_search(VILLAGE), random.Random(0)
    mistakes, memories, kinds = 0, 0, set()
    for row in VILLAGE.questions("train", 400, [1, 2, 3]):
        rollout = VILLAGE.expert_rollout(row, rng, search, rate)
        before: list[list[str]] = []
        for last, turn in zip(rollout["turns"], rollout["turns"][1:], strict=False):
            name, slot = re.search(r"<think>(\w+) (\w+)</think>", last["completion"]).groups()
            value = read_facts(last["response"])[slot]
            if not before:  # turn 1 has no memory; its objective is the only one that was begun
                before = [[name, slot]]
            expected = [*before[:-1], [*before[-1], value]]
            memory = memory_paths(turn["completion"])
            begun = {path[0] for path in expected}
            # What comes after the finding belongs to the next lookup and is no finding.
            kept = [path[: len(expected[-1])] if path[0] == expected[-1][0] else path for path in memory]
            kept = [path for path in kept if path[0] in begun]
            memories += 1
            if kept != expected:
                mistakes += 1
                kinds.add("dropped" if len(kept) < len(expected) else "name" if value in NAMES else "value")
            if turn["outcome"] == "tool_call":
                query = json.loads(re.search(r"<tool_call>(.*)</tool_call>", turn["completion"])[1])
                wanted = re.search(r"<think>(\w+) (\w+)</think>", turn["completion"]).groups()
                assert query["arguments"]["query"] == wanted[0]
                assert tuple(memory[-1][-2:]) == wanted
            before = memory
        told = answer_from_memory(row["question"], rollout["turns"][-1]["completion"])
        for i, (word, said) in enumerate(zip(told, rollout["answer"].split("; "), strict=True)):
            assert said == word if word else said in ATTRIBUTES[parse_objectives(row["question"])[i].attribute]
    assert kinds == {"dropped", "name", "value"}
    assert memories > 1000
    assert abs(mistakes - rate * memories) < (25 * memories * rate * (1 - rate)) ** 0.5


def test_mistakes_cost_answers():
    """Half of the memories wrong leaves fewer right answers than none wrong, but some."""
    search, rng = make_search(VILLAGE), random.Random(0)
    rollouts = [VILLAGE.expert_rollout(row, rng, search, 0.5) for row in VILLAGE.questions("train", 100, [2])]
    right = [
        answer == aliases[0]
        for rollout in rollouts
        for answer, aliases in zip(rollout["answer"].split("; "), rollout["golden_answers"], strict=True)
    ]
    assert 0.2 < sum(right) / len(right) < 0.8


@given(st.text())
def test_tokenizer_round_trip(text):
    """Any text comes back byte for byte, and so does text beside the tags and inside a call."""
    for string in (text, f"<mem>{text}</mem>", CALL_TOKENS[0] + text + CALL_TOKENS[1]):
        assert TOKENIZER.decode(TOKENIZER(string)["input_ids"]) == string


def test_words_are_one_token():
    """Names and values are one token, with a leading space and without, and so are tags and the frame of a call."""
    words = [*VILLAGE.people, *ATTRIBUTES, *RELATIONS, *(value for values in ATTRIBUTES.values() for value in values)]
    for text in [*words, *(f" {word}" for word in words), *TAG_TOKENS, *CALL_TOKENS, "user", "assistant", "tool"]:
        assert len(TOKENIZER(text)["input_ids"]) == 1, text


def test_lengths():
    """Passages have 40 to 60 tokens as the model reads them, and turns at most 45."""
    search = make_search(VILLAGE)
    for row in VILLAGE.questions("train", 60, [1, 2, 3]):
        for turn in VILLAGE.expert_rollout(row, random.Random(0), search)["turns"]:
            assert len(TOKENIZER(turn["completion"])["input_ids"]) <= 45
            assert turn["response"] is None or 40 <= len(TOKENIZER(turn["response"])["input_ids"]) <= 60


def test_tags_survive_special_token_skipping():
    """Tags are not special, so decoding for the parser keeps them; the tokens of ChatML go."""
    ids = TOKENIZER("<mem>Anna</mem><|im_end|>")["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<mem>Anna</mem>"
    assert not set(TAG_TOKENS) & set(TOKENIZER.all_special_tokens)
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_is_verbatim():
    """Every role and every space is rendered as given, with and without a system message."""
    messages = [
        {"role": "user", "content": " Hi? \n"},
        {"role": "assistant", "content": "<mem> a </mem><think>b</think>"},
        {"role": "tool", "content": "\nDoc 1"},
    ]
    expected = (
        "<|im_start|>user\n Hi? \n<|im_end|>\n<|im_start|>assistant\n<mem> a </mem><think>b</think><|im_end|>\n"
        "<|im_start|>tool\n\nDoc 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected
    system = [{"role": "system", "content": "S"}]
    assert TOKENIZER.apply_chat_template(system + messages[:1], tokenize=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n Hi? \n<|im_end|>\n"
    )


def test_model_starts_as_a_copier():
    """Equal tokens attract each other, what is attended to is passed on, and both forms of a word are similar."""
    model = build_model(TOKENIZER)
    for layer in model.model.layers:
        assert torch.equal(layer.self_attn.k_proj.weight, layer.self_attn.q_proj.weight)
        assert torch.equal(layer.self_attn.o_proj.weight, layer.self_attn.v_proj.weight.T)
    embeddings = model.get_input_embeddings().weight
    bare, spaced, other = (embeddings[TOKENIZER(text)["input_ids"][0]] for text in ("cat", " cat", " dog"))
    assert torch.cosine_similarity(bare, spaced, dim=0) > 0.8 > torch.cosine_similarity(bare, other, dim=0)
    assert torch.equal(build_model(TOKENIZER, seed=1).lm_head.weight, build_model(TOKENIZER, seed=1).lm_head.weight)


def test_command_writes_a_village(tmp_path):
    """The command writes all files; the folder `model` gives the same ids and logits through the Auto classes."""
    argv = (
        f"--output_dir {tmp_path} --seed 3 --num_train 12 --num_test 6 --objectives 1 2 --rollout_objectives 2 "
        "--num_rollouts 10 --num_practice_villages 3 --memory_mistake_rate 0.2"
    )
    (args,) = TrlParser((VillageArguments,)).parse_args_and_config(argv.split())
    module.main(args)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("corpus", "train", "test", "rollouts")
    }
    assert {name: len(value) for name, value in rows.items()} == {"corpus": 60, "train": 12, "test": 6, "rollouts": 10}
    assert rows["corpus"] == VILLAGE.corpus()
    assert len({rollout["id"] for rollout in rows["rollouts"]}) == 10

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in (
        VILLAGE.passage(next(iter(VILLAGE.people))),
        rows["rollouts"][0]["turns"][1]["completion"],
        " \u00e9\n",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == TOKENIZER(text)["input_ids"] and tokenizer.decode(ids) == text
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, LlamaForCausalLM)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    inputs = torch.tensor([TOKENIZER("What is the pet of Anna?")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).logits, build_model(TOKENIZER, seed=3)(inputs).logits)
