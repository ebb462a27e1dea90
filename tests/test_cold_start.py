"""Cold start: what SFT trains is what RL would train, replayed from files, and the rollouts that are written by rule."""

import json
import re

import pytest
import torch
from conftest import byte_tokenizer, call, generation, play_script, search, tiny_model
from trl import SFTConfig, SFTTrainer

from mempo_trl import BM25Retriever, SearchTool
from mempo_trl.data.cold_start import (
    IGNORE_INDEX,
    drop_reason,
    read_rollouts,
    record_reward,
    replay,
    scripted_rollout,
    sft_rows,
    split_by_question,
)
from mempo_trl.generation import Generation
from mempo_trl.monitoring import rollout_record
from mempo_trl.protocol import Protocol
from mempo_trl.sequences import build_sequences
from mempo_trl.tools import Toolbox


MEMORY_TURNS = [
    "<think>\nFirst.\n</think>\n" + call("Anna"),
    "<mem>\nAnna has a cat.\n</mem>\n<think>\nSure?\n</think>\n" + call("cat 里德 42%"),
    "<mem>cat</mem><think>Done.</think><answer>cat</answer>",
]
FULL_TURNS = [re.sub(r"<mem>.*?</mem>\s*", "", turn, flags=re.DOTALL) for turn in MEMORY_TURNS]


@pytest.fixture(scope="module", params=["byte", "smollm2", "qwen"])
def any_tokenizer(request):
    """The byte tokenizer with tags as tokens, and two real ones."""
    return byte_tokenizer() if request.param == "byte" else request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="module")
def any_model(any_tokenizer):
    return tiny_model(any_tokenizer)


def make_protocol(tokenizer, context="memory", **kwargs) -> Protocol:
    return Protocol(tokenizer, Toolbox([search], retries=0), context=context, system_prompt="Search.", **kwargs)


def dump(rollout, tmp_path, ids: bool) -> list[dict]:
    """A rollout as training or evaluation writes it, read again."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(rollout_record(rollout, ids=ids), ensure_ascii=False) + "\n", encoding="utf-8")
    return list(read_rollouts(path))


def trained_by_sft(rows, model, tokenizer, folder) -> list[tuple[list[int], list[int]]]:
    """Ids and labels as `SFTTrainer` feeds them to the model, without padding; one pair per row, in order."""
    args = SFTConfig(
        str(folder), per_device_train_batch_size=len(rows), use_cpu=True, bf16=False, report_to="none", max_length=None
    )
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    (batch,) = list(trainer.get_train_dataloader())
    pairs = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        kept = mask.bool()
        assert (labels[~kept] == IGNORE_INDEX).all()
        pairs.append((ids[kept].tolist(), labels[kept].tolist()))
    order = [row["input_ids"] for row in rows]
    return sorted(pairs, key=lambda pair: order.index(pair[0]))


def trained_by_rl(rollout) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of the sequences that MemPO would train for a rollout."""
    return [
        (
            sequence.prompt_ids + sequence.completion_ids,
            [IGNORE_INDEX] * len(sequence.prompt_ids)
            + [
                token_id if trained else IGNORE_INDEX
                for token_id, trained in zip(sequence.completion_ids, sequence.loss_mask, strict=True)
            ],
        )
        for sequence in build_sequences(rollout, 0)
    ]


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "from text"])
@pytest.mark.parametrize("context", ["memory", "full"])
def test_sft_trains_what_rl_would_train(any_tokenizer, any_model, context, ids, tmp_path):
    """
    The ids and labels that `SFTTrainer` feeds to the model are the ids and masks of the sequences that MemPO trains for
    the same rollout, token for token, whether the file holds ids or text.
    """
    protocol = make_protocol(any_tokenizer, context)
    rollout = play_script(protocol, MEMORY_TURNS if context == "memory" else FULL_TURNS)
    assert rollout.outcome == "answer" and rollout.well_formed
    rows, _ = sft_rows(dump(rollout, tmp_path, ids), protocol)
    fed = trained_by_sft(rows, any_model, any_tokenizer, tmp_path)
    assert fed == trained_by_rl(rollout)
    # Turns 1 and 2 are one sequence with the memory context, and turn 3 starts anew; everything is one otherwise.
    assert len(fed) == (2 if context == "memory" else 1)
    # Labels hold the sampled turns with their end of turn, in order, and nothing else.
    labels = [label for _, labels in fed for label in labels if label != IGNORE_INDEX]
    assert labels == rollout.completion_ids
    assert labels.count(any_tokenizer.eos_token_id) == 3


def test_tokens_that_are_sampled_otherwise(tmp_path):
    """
    A turn that was sampled in other tokens than its text gives is trained as it was sampled when its ids are recorded,
    and as its text gives when they are not.
    """
    tokenizer = byte_tokenizer()
    protocol = make_protocol(tokenizer)
    answer = "<mem>cat</mem><answer>cat</answer>"
    spelled = [token_id for char in answer for token_id in tokenizer(char)["input_ids"]]  # tags as single bytes
    assert tokenizer.decode(spelled) == answer and len(spelled) == len(answer)
    rollout = play_script(protocol, [call("a"), Generation([*spelled, tokenizer.eos_token_id], finish_reason="stop")])
    (record,) = dump(rollout, tmp_path, ids=True)
    assert replay(record, protocol).completion_ids == rollout.completion_ids
    (record,) = dump(rollout, tmp_path, ids=False)
    shorter = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
    assert replay(record, protocol).turns[1].completion_ids == shorter
    assert len(shorter) < len(spelled)


SCRIPTS = {
    "a bad call, and a better one": [
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
        "<mem>a</mem>" + call("a"),
        "<mem>cat</mem><answer>cat</answer>",
    ],
    "no action": [call("a"), "<mem>no idea</mem>"],
    "an empty turn": [call("a"), Generation([], finish_reason="stop")],
    "text after the call": [call("a") + "<tool_response>invented</tool_response>", "<mem>m</mem><answer>cat</answer>"],
    "several calls": [call("a") + call("b"), "<mem>m</mem><answer>cat</answer>"],
    "an answer at once": ["<answer>cat</answer>"],
}


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "from text"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_any_outcome_replays(name, ids, tmp_path, protocol):
    """A dumped rollout of any outcome gives the sequences that it gave when it was played."""
    rollout = play_script(protocol, SCRIPTS[name])
    (record,) = dump(rollout, tmp_path, ids)
    again = replay(record, protocol)
    if name == "an empty turn" and not ids:  # text does not say that not even an end of turn was sampled
        assert again.turns.pop().completion_ids == [protocol.tokenizer.eos_token_id]
        rollout.turns.pop()
    assert trained_by_rl(again) == trained_by_rl(rollout)
    assert (again.outcome, again.answer, again.well_formed) == (rollout.outcome, rollout.answer, rollout.well_formed)
    assert again.messages() == rollout.messages()


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "from text"])
@pytest.mark.parametrize("last", [call("b")[:20], "<mem>m</mem><answer>ca"])
def test_a_cut_turn_replays(last, ids, tmp_path, protocol, tokenizer):
    """A turn that was cut is trained without an end of turn, and cut again."""
    rollout = play_script(protocol, [call("a"), generation(tokenizer, last, end=False)])
    assert rollout.outcome == "truncated"
    (record,) = dump(rollout, tmp_path, ids)
    again = replay(record, protocol)
    assert trained_by_rl(again) == trained_by_rl(rollout)
    assert again.outcome == "truncated"
    assert again.completion_ids[-1] != tokenizer.eos_token_id


@pytest.mark.parametrize("outcome", ["out_of_turns", "out_of_context"])
def test_a_rollout_out_of_turns_or_context_replays(outcome, tmp_path, protocol):
    """A rollout that was stopped after a search, for want of turns or of room, gives the sequences that it gave."""
    turns = [call("a"), "<mem>m</mem>" + call("b" * 50), "unused"]
    room = len(play_script(protocol, turns).turns[1].prompt_ids)  # what turn 3 would see is longer
    rollout = play_script(
        protocol, turns, **{"out_of_turns": {"max_turns": 2}, "out_of_context": {"max_prompt_length": room}}[outcome]
    )
    assert (len(rollout.turns), rollout.outcome) == (2, outcome)
    (record,) = dump(rollout, tmp_path, ids=False)
    again = replay(record, protocol)
    assert trained_by_rl(again) == trained_by_rl(rollout)
    assert again.outcome == rollout.outcome


def test_a_failed_search_replays(tmp_path, tokenizer):
    """What the model was told about a search that failed is replayed, and no search is made."""
    calls = []

    def search(query: str) -> str:
        """
        Fails.

        Args:
            query: What to search for.
        """
        calls.append(query)
        raise RuntimeError("no network")

    protocol = Protocol(tokenizer, Toolbox([search], retries=0), system_prompt="Search.")
    rollout = play_script(protocol, [call("a"), "<mem>m</mem><answer>cat</answer>"])
    assert rollout.turns[0].tool_error is not None and calls == ["a"]
    (record,) = dump(rollout, tmp_path, ids=False)
    assert trained_by_rl(replay(record, protocol)) == trained_by_rl(rollout)
    assert calls == ["a"]


def test_responses_belong_to_their_turns(protocol):
    """In a written rollout without outcomes, a turn whose call is bad does not use up the response of the next one."""
    record = {
        "question": "What is the pet of Anna?",
        "turns": [
            {"completion": "<tool_call>no JSON</tool_call>", "response": "Error: what the writer made of it"},
            {"completion": call("a"), "response": "first response"},
            {"completion": call("b"), "response": "second response"},
            {"completion": "<mem>m</mem><answer>cat</answer>"},
        ],
    }
    rollout = replay(record, protocol)
    assert [turn.response for turn in rollout.turns[1:]] == ["first response", "second response", None]
    assert rollout.turns[0].response.startswith("Error: ")


def test_a_search_without_a_response_is_an_error(protocol):
    """A search in the middle needs the response that the model saw; the message names the question."""
    record = {"question": "Whose pet?", "turns": [{"completion": call("a")}, {"completion": "<answer>cat</answer>"}]}
    with pytest.raises(ValueError, match=r"no recorded response: 'Whose pet\?'"):
        replay(record, protocol)


class Lookup:
    """Another tool, for another protocol."""

    name = "lookup"

    def __call__(self, query: str) -> str:
        """
        Looks up.

        Args:
            query: What to look up.
        """
        return f"{query} found"


@pytest.mark.parametrize("recorded", [True, False], ids=["dumped", "written"])
def test_another_tool_is_another_protocol(recorded, tmp_path, tokenizer):
    """A rollout that calls a tool which the protocol lacks is a `ValueError`, not a rollout of bad calls."""
    theirs = Protocol(tokenizer, Toolbox([Lookup()]), system_prompt="Look it up.")
    turns = [call("a").replace("search", "lookup"), "<mem>m</mem><answer>cat</answer>"]
    rollout = play_script(theirs, turns)
    assert rollout.outcome == "answer"
    record = rollout_record(rollout)
    if not recorded:
        record = {"question": "q", "turns": [{"completion": turns[0], "outcome": "tool_call", "response": "a found"}]}
        record["turns"].append({"completion": turns[1]})
    assert replay(record, theirs).turns[0].outcome == "tool_call"
    with pytest.raises(
        ValueError, match="made for another protocol; the turn in question is '<tool_call>.*, here 'bad_call'"
    ):
        replay(record, make_protocol(tokenizer))


def test_ids_of_another_tokenizer_are_another_protocol(tmp_path, tokenizer):
    """Recorded ids that mean something else in this tokenizer are a `ValueError`."""
    rollout = play_script(make_protocol(tokenizer), [call("a"), "<mem>m</mem><answer>cat</answer>"])
    (record,) = dump(rollout, tmp_path, ids=True)
    plain = make_protocol(byte_tokenizer(tags_are_tokens=False))
    for turn in record["turns"]:  # the ids of the tags are none of theirs: as a smaller vocabulary would have it
        turn["completion_ids"] = [token_id % 256 for token_id in turn["completion_ids"]]
    with pytest.raises(ValueError, match="made for another protocol"):
        replay(record, plain)


def test_turns_after_the_end_are_another_protocol(protocol):
    """Recorded turns behind one that ends the rollout are not dropped in silence."""
    turns = [{"completion": "<answer>cat</answer>"}, {"completion": "<mem>m</mem><answer>dog</answer>"}]
    with pytest.raises(ValueError, match="has 2 turns .* ends as 'answer' after 1"):
        replay({"question": "q", "turns": turns}, protocol)


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        '"text"',
        '{"turns": [{"completion": "a"}]}',
        '{"question": "q"}',
        '{"question": "q", "turns": []}',
        '{"question": 1, "turns": [{"completion": "a"}]}',
        '{"question": "q", "turns": [{"text": "a"}]}',
        '{"question": "q", "turns": [{"completion": null}]}',
        '{"question": "q", "turns": {"completion": "a"}}',
        '{"question": "q", "turns": ["a"]}',
    ],
)
def test_bad_lines_are_named(line, tmp_path):
    """A line that is no rollout is an error with its number and the file, after the good ones before it."""
    path = tmp_path / "rollouts.jsonl"
    good = json.dumps({"question": "q", "turns": [{"completion": "a"}]})
    path.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    rollouts = read_rollouts(path)
    assert next(rollouts)["question"] == "q"
    with pytest.raises(ValueError, match=r"Line 3 of '.*rollouts\.jsonl' is not a rollout"):
        next(rollouts)


def test_rows_of_several_rollouts(protocol):
    """Rows come in the order of the rollouts and of their sequences."""
    rollouts = [
        play_script(protocol, ["<answer>cat</answer>"]),
        play_script(protocol, MEMORY_TURNS),
        play_script(protocol, ["<answer>dog</answer>"]),
    ]
    rows, _ = sft_rows(map(rollout_record, rollouts), protocol)
    expected = [pair for rollout in rollouts for pair in trained_by_rl(rollout)]
    assert [(row["input_ids"], row["labels"]) for row in rows] == expected
    assert len(rows) == 1 + 2 + 1


PASSAGES = [
    {"id": "0", "title": "Anna", "text": "Anna was born in Oslo. Her pet is a cat. She bakes."},
    {"id": "1", "title": "Ben", "text": "Ben is a friend of Anna. He sails."},
    {"id": "2", "title": "Oslo", "text": "Oslo is a town."},
]


@pytest.fixture
def search_tool(tmp_path) -> SearchTool:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES), encoding="utf-8")
    return SearchTool(BM25Retriever.from_corpus(str(path)), top_k=2)


def test_scripted_rollout(search_tool):
    """
    A rollout by rule searches each gold title, remembers the sentence with the answer where there is one, and answers
    with the first alias of each objective. It has the form that is demanded and the responses of the real search.
    """
    row = {
        "id": "7",
        "question": "Which pet has the friend of Ben?",
        "golden_answers": [["cat", "a cat"], ["Anna"]],
        "supporting_titles": ["Ben", "Anna"],
    }
    record = scripted_rollout(row, search_tool)
    assert (record["id"], record["answer"], record["outcome"]) == ("7", "cat; Anna", "answer")
    protocol = Protocol(byte_tokenizer(), Toolbox([search_tool]), system_prompt="Search.")
    rollout = replay(record, protocol)
    assert (rollout.outcome, rollout.answer, rollout.well_formed) == ("answer", "cat; Anna", True)
    assert [turn.call and turn.call["arguments"]["query"] for turn in rollout.turns] == ["Ben", "Anna", None]
    assert [turn.response for turn in rollout.turns] == [search_tool("Ben"), search_tool("Anna"), None]
    # Ben's first sentence has the answer "Anna" in it, Anna's second the answer "cat"; turn 1 has nothing to remember.
    notes = ["Ben: Ben is a friend of Anna.", "Anna: Anna was born in Oslo."]
    assert [turn.memory for turn in rollout.turns] == [None, f"\n{notes[0]}\n", f"\n{notes[0]} {notes[1]}\n"]
    one_answer = scripted_rollout({**row, "golden_answers": [["cat"]], "supporting_titles": ["Anna"]}, search_tool)
    assert "<mem>\nAnna: Her pet is a cat.\n</mem>" in one_answer["turns"][1]["completion"]


def test_scripted_rollout_replays_in_full_form(search_tool, any_tokenizer):
    """A title with quotes, backslashes or tags of the protocol gives a call that is read back as it was meant."""
    title = 'The "Reed" \\ 里德 & <b>'
    document = search_tool.search("Anna")[0].__class__("9", title, "A title.")
    search_tool.search = lambda query: [document]
    row = {"question": "q", "golden_answers": [["A title"]], "supporting_titles": [title]}
    protocol = Protocol(any_tokenizer, Toolbox([search_tool]), system_prompt="Search.")
    rollout = replay(scripted_rollout(row, search_tool), protocol)
    assert rollout.turns[0].call == {"name": "search", "arguments": {"query": title}}


@pytest.mark.parametrize("titles", [["Anna", "Nobody"], [], None])
def test_no_scripted_rollout(titles, search_tool):
    """A question whose gold passages are not all found, or that has none, gives no rollout."""
    row = {"question": "q", "golden_answers": [["cat"]], "supporting_titles": titles}
    assert scripted_rollout(row, search_tool) is None


def test_gradient_reaches_only_trained_tokens(protocol, tokenizer, tmp_path):
    """
    The loss that `SFTTrainer` computes is the mean negative log-probability of the sampled tokens alone.
    """
    rollout = play_script(protocol, MEMORY_TURNS)
    rows, _ = sft_rows([rollout_record(rollout)], protocol)
    model = tiny_model(tokenizer)
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to="none", max_length=None
    )
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    (batch,) = list(trainer.get_train_dataloader())
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, {**batch}).item()
        total, count = 0.0, 0
        for sequence in build_sequences(rollout, 0):
            ids = torch.tensor(sequence.prompt_ids + sequence.completion_ids)
            logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            mask = torch.tensor([0] * len(sequence.prompt_ids) + sequence.loss_mask)[1:].bool()
            total -= logps[mask].sum().item()
            count += mask.sum().item()
    assert count == len(rollout.completion_ids)
    assert loss == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    ("record", "reward"),
    [
        ({"answer": "cat", "well_formed": True, "golden_answers": [["a cat", "tom"]]}, 1.0),
        ({"answer": "cat", "well_formed": False, "golden_answers": [["cat"]]}, 0.0),
        ({"answer": None, "well_formed": False, "golden_answers": [["cat"]]}, 0.0),
        ({"answer": "cat; dog", "well_formed": True, "golden_answers": [["cat"], ["hen"]]}, 0.5),
        ({"answer": "cat", "well_formed": True, "golden_answers": ["cat"]}, 1.0),  # as a hand writes it
        ({"answer": "cat", "well_formed": True, "golden_answers": [["cat"]], "reward": 0.25}, 0.25),
        ({"answer": "cat", "well_formed": True, "golden_answers": [["cat"]], "reward": None}, 1.0),
        ({"answer": "cat", "well_formed": True, "golden_answers": None}, None),
    ],
)
def test_record_reward(record, reward):
    """The recorded reward counts; else it is exact match times form, and unknown without golden answers."""
    assert record_reward(record) == reward


def test_drop_reason():
    """A rollout is dropped for the first of the reasons that holds, and at the very limit of none."""
    record = {"answer": "dog", "well_formed": False, "golden_answers": [["cat"]], "tokens_peak": 100}
    record["outcome"] = "answer"
    assert drop_reason(record) is None
    assert drop_reason(record, 0.0, max_tokens=100) is None
    assert drop_reason(record, 1.0, True, 99) == "not well formed"
    assert drop_reason(record, 0.1, False, 99) == "reward too low"
    assert drop_reason(record, 0.0, False, 99) == "too long"
    assert drop_reason({**record, "golden_answers": None}, 0.0) == "reward too low"
    assert drop_reason({**record, "outcome": "failed"}, 0.0) == "failed"


def test_split_by_question():
    """Rollouts of a question stay together, a seed gives one split, and both parts keep their order."""
    records = [{"question": f"q{i % 10}", "number": i} for i in range(30)]
    train, dev = split_by_question(records, 0.2, seed=1)
    assert len(dev) == 6 and len(train) == 24
    assert not {record["question"] for record in train} & {record["question"] for record in dev}
    assert sorted([*train, *dev], key=lambda record: record["number"]) == records
    assert [record["number"] for record in train] == sorted(record["number"] for record in train)
    assert (train, dev) == split_by_question(records, 0.2, seed=1) != split_by_question(records, 0.2, seed=2)
    assert len(split_by_question(records, 0.01)[1]) == 3  # at least one question


def test_failed_rollouts_are_read(tmp_path):
    """A rollout that failed has no turns and is read as such, to be counted."""
    record = {"question": "q", "outcome": "failed", "error": "no server", "turns": []}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert list(read_rollouts(tmp_path / "rollouts.jsonl")) == [record]
