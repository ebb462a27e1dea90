"""The probe: written rollouts whose golden answer is found, kept, lost, found again or guessed."""

import json

import pytest
import torch
from conftest import call, play_script, tiny_model
from records import failed, record, turn

from mempo_trl import cli
from mempo_trl.config import ANSWER_TEMPLATE
from mempo_trl.evaluation.probe import holds, probe_probabilities, probe_rollout, probe_texts, table_rows
from mempo_trl.memory_reward import make_answer
from mempo_trl.monitoring import rollout_record
from mempo_trl.scoring import RowScorer


DOC = "Doc 1(Title: Anna) The pet of Anna is a cat."
OTHER = "Doc 1(Title: Ben) Ben was born in Rome."


def rollout(answer: str | None, *turns: tuple[str | None, str | None], golden=(("cat", "kitten"),), **kwargs) -> dict:
    """A rollout of `(memory, response)` turns; a turn without a response is the answer."""
    played = [
        turn(10, 5, "tool_call" if response else "answer", memory=memory, response=response)
        for memory, response in turns
    ]
    outcome = "answer" if answer is not None else "out_of_turns"
    return record(answer, [list(aliases) for aliases in golden], played, outcome, "What is the pet of Anna?", **kwargs)


@pytest.mark.parametrize(
    "turns, answer, found, lost",
    [
        ([(None, DOC), ("a cat", None)], "cat", 1, None),
        ([(None, DOC), ("a kitten", OTHER), ("The Cat!", None)], "kitten", 1, None),  # any alias counts
        ([(None, DOC), ("Anna", OTHER), ("Anna", None)], "dog", 1, 2),  # the memory of turn 2 drops the document's
        ([(None, DOC), ("a cat", OTHER), ("Ben", OTHER), ("Ben", None)], "dog", 1, 3),
        ([(None, DOC), ("a cat", OTHER), (None, None)], "dog", 1, 3),  # no memory at all
        ([(None, DOC), ("Anna", None)], "a cat", 1, None),  # it went into the answer
        ([(None, DOC), ("Anna", DOC), ("cat", None)], "cat", 1, None),  # lost and found again
        ([(None, DOC), ("Anna", OTHER), ("a cat", None)], "cat", 1, None),  # lost, and remembered by luck
        ([(None, OTHER), ("Ben", DOC)], None, 2, None),  # found in the last turn: nothing could be lost
        ([(None, OTHER), ("Ben", None)], "dog", None, None),
        ([(None, OTHER), ("a cat", OTHER), ("Ben", None)], "dog", None, 3),  # a right guess can be lost too
        ([(None, "Doc 1(Title: Anna) catfish"), ("catfish", None)], "catfish", None, None),  # whole words
    ],
)
def test_where_an_answer_is_lost(turns, answer, found, lost):
    """The turn whose response first holds the golden answer, and the one whose memory holds it no more for good."""
    (objective,) = probe_rollout(rollout(answer, *turns))["objectives"]
    assert (objective["found_turn"], objective["lost_turn"]) == (found, lost)


def test_shares_by_hand():
    """Every share of four rollouts, one of them with two objectives and one with yes/no, derived by hand."""
    rollouts = [
        # Found in turn 1, kept, answered.
        rollout("cat", (None, DOC), ("a cat", None)),
        # Found in turn 1, lost in turn 2; the answer is in no document, and turn 3's memory guesses it.
        rollout("dog", (None, DOC), ("Anna", OTHER), ("a dog", None)),
        # Two objectives: the first found in turn 1, kept in turn 2, lost in turn 3; the second never found.
        # The answer to the second, "Paris", is guessed in the memories of turns 2 and 3.
        rollout(
            "none; Paris",
            (None, DOC),
            ("cat, Paris", OTHER),
            ("Paris", None),
            golden=[["cat"], ["Oslo"]],
        ),
        # Yes or no is not looked for.
        rollout("yes", (None, DOC), ("yes", None), golden=[["Yes"]]),
        # Nothing was played.
        failed([["cat"]]),
    ]
    probe = probe_texts(rollouts)
    # Objectives: 1 + 1 + 2 + 0 + 1 = 5; found: the first of each of the three rollouts.
    assert (probe["num_rollouts"], probe["num_objectives"], probe["skipped_objectives"]) == (5, 5, 1)
    assert probe["found_objectives"] == 3 and probe["in_documents"] == 3 / 5
    assert probe["in_memory"] == 2 / 5  # rollouts 1 and 3
    assert probe["in_last_memory"] == probe["in_answer"] == probe["right"] == 1 / 5
    assert probe["of_found"] == {
        "in_memory": 2 / 3,
        "in_last_memory": 1 / 3,
        "in_answer": 1 / 3,
        "right": 1 / 3,
        "lost": 2 / 3,
        "lost_by_turn": {"2": 1, "3": 1},
    }
    # Memories: 1 + 2 + 2 + 1 = 6. Guesses: turn 3 of the second rollout, turns 2 and 3 of the third.
    assert (probe["memories"], probe["guess"]) == (6, 3 / 6)
    assert [row["guess_turns"] for row in probe["rollouts"]] == [[], [3], [2, 3], [], []]
    # Answers given: "cat" in a document; "dog" not; "none" and "Paris" not.
    assert probe["unsupported_answers"] == 3 / 4
    cells = {name: value for name, value, _ in table_rows(probe)}
    assert cells["in_documents"] == "60.0%" and cells["lost in turn 3"] == "1"
    assert cells["memories with a guess"] == "50.0%"


@pytest.mark.parametrize(
    "memory, before, guess",
    [
        ("a dog", OTHER, True),
        ("a dog", "Doc 1(Title: Dog) The dog.", False),  # a document said so
        ("Anna", OTHER, False),  # the question says so
        ("a cat", OTHER, False),  # not what the rollout answers
    ],
)
def test_what_a_guess_is(memory, before, guess):
    """A memory guesses if it holds the rollout's own answer, which neither the question nor a document before holds."""
    answer = "Anna" if memory == "Anna" else "dog"
    row = rollout(answer, (None, before), (memory, "Doc 1(Title: Dog) Anna has a dog."), ("so", None))
    assert probe_rollout(row)["guess_turns"] == ([2] if guess else [])


def test_errors_are_no_documents():
    """What a bad call or a failed search is answered with is not a document."""
    row = rollout("cat", (None, DOC), (None, DOC), ("a cat", None))
    row["turns"][0]["outcome"], row["turns"][1]["tool_error"] = "bad_call", "no network"
    (objective,) = probe_rollout(row)["objectives"]
    assert not objective["in_documents"] and objective["unsupported"]


def test_whole_words():
    """Words are whole, but in scripts without spaces between them; an empty answer is held by nothing."""
    assert holds("the cat sat", ["dog", "cat"]) and holds("cat", ["cat"])
    assert not holds("catfish", ["cat"]) and not holds("a cat", [""]) and not holds("", ["cat"])
    assert holds("他毕业于里德学院后", ["里德学院"]) and holds("ab 里德", ["ab 里德"])


def test_nothing_to_take_a_share_of():
    """Shares of nothing are `None`, and say so in the table."""
    probe = probe_texts([failed([["yes"]])])
    assert probe["in_documents"] is probe["guess"] is probe["of_found"]["lost"] is None
    assert ("in_documents", "none", "0 objectives") in table_rows(probe)


def test_wrong_input():
    """Rollouts without golden answers, and an unknown normaliser, are refused by name."""
    with pytest.raises(ValueError, match="'who\\?' has no `golden_answers`"):
        probe_texts([record("x", None, question="who?")])
    with pytest.raises(ValueError, match="'loose'"):
        probe_texts([], "loose")


SCRIPT = [
    "<think>go</think>" + call("Anna"),
    "<mem>a cat</mem><think>so</think>" + call("Bo"),
    "<mem>cat, Rome</mem><think>I know</think><answer>cat; Rome</answer>",
]


@pytest.mark.parametrize("ids, template", [(True, ANSWER_TEMPLATE), (False, "<answer>{answer}</answer>")])
def test_probabilities(protocol, tokenizer, ids, template):
    """
    P_mem and P_full of each turn are the geometric means of the answer's tokens after prefix and memory, and after the
    whole history, in the given template, whether the record holds token ids or texts only.
    """
    model = tiny_model(tokenizer).eval()
    played = play_script(protocol, SCRIPT, golden_answers=[["cat"], ["Rome"]])
    records = [rollout_record(played, ids=ids, id="1", sample=0), failed([["x"]])]
    batches = []
    probe = probe_probabilities(
        records,
        protocol=protocol,
        scorer=RowScorer(model, 0),
        tokenizer=tokenizer,
        answer_template=template,
        on_batch=batches.append,
    )
    answer = make_answer(tokenizer, played.golden_answers, template)

    def probability(context: list[int]) -> float:
        sequence = context + answer.ids
        with torch.no_grad():
            logps = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
        places = [len(context) + position for position in answer.positions]
        return torch.stack([logps[place - 1, sequence[place]] for place in places]).mean().exp().item()

    (row,) = probe["rollouts"]
    assert row["turns"][0] == {"P_mem": None, "P_full": None, "R_M": None}
    for index in (1, 2):
        p_mem = probability(played.prefix_ids + played.turns[index].memory_ids)
        p_full = probability(played.history_ids[: played.history_length(index)])
        assert row["turns"][index] == pytest.approx(
            {"P_mem": p_mem, "P_full": p_full, "R_M": p_mem - p_full}, rel=1e-4
        )
        assert probe["by_turn"][str(index + 1)] == pytest.approx({"memories": 1, **row["turns"][index]})
    assert (probe["num_rollouts"], probe["left_out"], batches) == (1, 1, [1])
    assert "turn 3: P_mem, P_full, R_M" in [
        name for name, *_ in table_rows(probe_texts(records) | {"probabilities": probe})
    ]


def test_command_without_a_model(tmp_path, capsys):
    """`mempo evaluate --probe_memory` on finished rollouts needs nothing else, and writes `probe.json` and a table."""
    rows = [rollout("cat", (None, DOC), ("a cat", None), id="1", sample=0)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["evaluate", "--probe_memory", "--output_dir", str(tmp_path)]) == 0
    probe = json.loads((tmp_path / "probe.json").read_text())
    assert probe["in_documents"] == 1.0 and "guess" in probe["definitions"] and "probabilities" not in probe
    assert "in_last_memory" in capsys.readouterr().out
    for more, error, message in (
        ([], ValueError, "`dataset_name`, or `--probe_memory`"),
        (["--probe_memory"], FileNotFoundError, "rollouts.jsonl"),
    ):
        with pytest.raises(error, match=message):
            cli.main(["evaluate", "--output_dir", str(tmp_path / "empty"), *more])
