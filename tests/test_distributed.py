"""Two processes on gloo against one: the same credit and weights, in step, and an error ends both with its cause."""

import json

import pytest
import torch
from conftest import config
from distributed_run import ROLLOUTS, excluded_trainer, given_rewards_trainer, outcome_of
from launching import by_rank, launch

from mempo_trl.processes import check_tool_timeout


pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(short_folder, tmp_path_factory):
    """What both processes wrote, per scenario, with the launcher's exit status and output."""
    return launch(
        2,
        short_folder,
        tmp_path_factory.mktemp("distributed"),
        "grpo",
        "dapo",
        "recomputed",
        "served",
        "generating",
        "excluded",
    )


def both(results, name):
    return by_rank(results, name, 2)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_two_processes_train_as_one(loss_type, results, short_folder, tmp_path):
    """A group split over two processes: the advantages, metrics and weights of one process."""
    first, second = both(results, loss_type)
    trainer = given_rewards_trainer(short_folder, tmp_path, 0, 1, loss_type=loss_type)
    trainer.train()
    single = json.loads(json.dumps(outcome_of(trainer)))
    assert first["steps"] == second["steps"] == single["steps"] == 2
    for name in ("rewards", "advantages", "memory_advantages"):
        joined = [a + b for a, b in zip(first[name], second[name], strict=True)]
        assert flat(joined) == pytest.approx(flat(single[name]), abs=1e-6)
    # Rewards 1, 0, 0, 1: mean 0.5, std 0.577350, +-0.5 / 0.577450.
    assert first["advantages"][0] == pytest.approx([0.865876, -0.865876], abs=1e-5)
    assert second["advantages"][0] == pytest.approx([-0.865876, 0.865876], abs=1e-5)
    # The memory rewards of both processes are one group: 0.3, 0.1, -0.2, -0.1, 0.5, 0.0, 0.8, mean 0.2, squares
    # 0.01 + 0.01 + 0.16 + 0.09 + 0.09 + 0.04 + 0.36 = 0.76, std sqrt(0.76 / 6) = 0.355903, with ε 0.356003.
    assert first["memory_advantages"][0][0][1] == pytest.approx(0.1 / 0.356003, abs=1e-5)
    assert second["memory_advantages"][0] == [[None, pytest.approx(0.6 / 0.356003, abs=1e-5)], [None]]
    for name, weight in single["weights"].items():
        for process in (first, second):
            torch.testing.assert_close(
                torch.tensor(process["weights"][name]), torch.tensor(weight), rtol=1e-4, atol=2e-6
            )
    for entry, expected in zip(first["logged"], single["logged"], strict=True):
        assert entry["rollout/turns_mean"] == expected["rollout/turns_mean"] == 11 / 4
        assert entry["sequences/per_rollout"] == expected["sequences/per_rollout"] == 8 / 4
        assert entry["reward"] == expected["reward"] == 0.5


def flat(value):
    """All numbers of nested lists in order, `None` as a number that no advantage is."""
    if isinstance(value, list):
        return [number for part in value for number in flat(part)]
    return [-99.0 if value is None else value]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_processes_stay_in_step(loss_type, results):
    """Six sequences on one process, two on the other: the same forwards of the same size, and the same backwards."""
    first, second = both(results, loss_type)
    assert [len(rollout) for rollout in ROLLOUTS] == [4, 4, 2, 1]
    # Two steps of two micro-batches, three rows each: two sequences of the second process are real, four are padding.
    assert first["rows"] == second["rows"] == [3, 3] * 2
    # The reference is another model, so these are the policy's forwards: one per micro-batch, or one per row. In the
    # second process two short rows would fit where the first one's do not: it makes as many forwards.
    expected = [[3, True]] * 4 if loss_type == "grpo" else [[1, True]] * 12
    assert first["forwards"] == second["forwards"] == expected
    assert first["backwards"] == second["backwards"] == 4


def test_recomputed_forwards_with_ddp(results):
    """`recompute_forwards` and gradient checkpointing change nothing of what DDP averages."""
    for kept, repeated in zip(both(results, "dapo"), both(results, "recomputed"), strict=True):
        assert repeated["weights"] == kept["weights"]


def test_processes_share_a_server(results):
    """One process loads each version of the adapter; both sample from it, from seeds that never meet."""
    first, second = both(results, "served")
    assert len(set(first["loaded"])) == len(first["loaded"]) == 2
    # Four rollouts of two turns per step.
    assert first["models"] == [name for name in first["loaded"] for _ in range(8)]
    assert len(set(first["seeds"])) == 16
    assert first["gaps"] == second["gaps"] and max(first["gaps"]) < 1e-4
    assert first["weights"] == second["weights"]


def test_excluded_rollouts_on_two_processes(results, short_folder, tmp_path):
    """One excluded rollout on each process: the two others of the group have the credit that they would have alone."""
    first, second = both(results, "excluded")
    assert (first["rewards"], second["rewards"]) == ([[1.0, None]], [[0.0, None]])
    # Rewards 1 and 0: +-0.5 / 0.707207; memory rewards 0.3 and 0.1: +-0.1 / 0.141521.
    assert first["advantages"] == [[pytest.approx(0.707007, abs=1e-6), 0.0]]
    assert second["advantages"] == [[pytest.approx(-0.707007, abs=1e-6), 0.0]]
    assert first["memory_advantages"] == [[[None, pytest.approx(0.706607, abs=1e-6)], [None, 0.0, 0.0]]]
    assert second["memory_advantages"] == [[[None, pytest.approx(-0.706607, abs=1e-6)], [None, 0.0]]]
    trainer = excluded_trainer(short_folder, tmp_path, 0, 1)
    trainer.train()
    for name, weight in outcome_of(trainer)["weights"].items():
        for process in (first, second):
            torch.testing.assert_close(
                torch.tensor(process["weights"][name]), torch.tensor(weight), rtol=1e-4, atol=2e-6
            )


def test_an_idle_process_keeps_generating(results):
    """Two turns on one process, four on the other: both call `generate` four times, the idle one with a dummy."""
    first, second = both(results, "generating")
    # [prompts, longest completion]: two rollouts of four turns; the other has two, then one, then one dummy prompt and
    # a single token for it.
    assert [calls[0] for calls in first["generated"]] == [2, 2, 2, 2]
    assert [calls[0] for calls in second["generated"]] == [2, 1, 1, 1]
    assert [calls[1] for calls in first["generated"] + second["generated"]] == [3] * 6 + [1] * 2
    assert len(first["generated_in_evaluation"]) == len(second["generated_in_evaluation"]) == 4
    assert first["forwards"] - forwards_of_generation(first) == second["forwards"] - forwards_of_generation(second)
    assert first["backwards"] == second["backwards"] == 2
    assert first["eval_reward"] == second["eval_reward"] == 0.5
    assert first["eval_turns"] == second["eval_turns"] == 11 / 4
    # Each process has a dump of its own.
    assert first["dumps"] == [
        f"{mode}-00000{step}-rank{rank}.jsonl" for mode, step in (("eval", 1), ("train", 0)) for rank in (0, 1)
    ]


def forwards_of_generation(process) -> int:
    """One forward per generated token position of each call."""
    return sum(length for _, length in process["generated"] + process["generated_in_evaluation"])


def failing(where, folder, tmp_path, config=None, timeout=120):
    """Output of two processes of which the second one fails."""
    results = launch(2, folder, tmp_path, f"failing_{where}", config=config, timeout=timeout)
    assert results["returncode"] != 0
    return results["output"]


def test_a_failing_rollout_ends_both(short_folder, tmp_path):
    """The process where it happened raises the error itself, the other one names it."""
    output = failing("rollout", short_folder, tmp_path)
    assert "[rank1]: ArithmeticError: no rollout today" in output
    assert "ProcessFailure: A rollout failed on process 1: ArithmeticError: no rollout today" in output


@pytest.mark.parametrize(
    "where",
    [
        "engine",
        pytest.param("scoring", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.slow),
        pytest.param("backward", marks=pytest.mark.slow),
    ],
)
def test_a_failure_ends_both(where, short_folder, tmp_path):
    """Whatever raises on one process, while the other one waits for it: both end, and both name the cause."""
    output = failing(where, short_folder, tmp_path)
    assert f"[rank1]: ArithmeticError: no {where} today" in output
    assert f"[RANK 0] Process 1 failed: ArithmeticError: no {where} today" in output


@pytest.mark.slow
def test_a_tool_that_hangs(short_folder, tmp_path):
    """A tool that hangs on one process, in a thread or in the event loop, is given up in time; training goes on."""
    results = launch(2, short_folder, tmp_path, "hanging_tool", "blocking_tool", timeout=120)
    for name in ("hanging_tool", "blocking_tool"):
        # Six searches on the first process; of the two rollouts on the second one, one searches once.
        expected = {"tool/error_frac": pytest.approx(1 / 7), "steps": 1}
        assert by_rank(results, name, 2) == [expected, expected]
    assert results["returncode"] == 0


@pytest.mark.slow
def test_too_many_tool_failures_end_both(short_folder, tmp_path):
    """Where that is too many failures, the error names the cause on the process that had no failure as well."""
    output = failing("tool", short_folder, tmp_path)
    for rank in (0, 1):
        (line,) = [line for line in output.splitlines() if line.startswith(f"[rank{rank}]: RuntimeError: 1 of 7 tool")]
        assert "no answer within 0.5 s" in line


def test_tool_calls_are_given_up_before_the_other_processes_give_up(tmp_path):
    """The longest call has to fit into the time-out of the processes that wait for it; one process waits for nobody."""
    # Three attempts of 600 s with pauses of up to 1 and 2 s.
    args = config(tmp_path, tool_timeout=600.0, tool_retries=2)
    check_tool_timeout(args, num_processes=1)
    with pytest.raises(ValueError, match="may take 1803 s .* `ddp_timeout` = 1800 s"):
        check_tool_timeout(args, num_processes=2)
    check_tool_timeout(config(tmp_path, tool_timeout=598.0, tool_retries=2), num_processes=2)  # 1797 s
