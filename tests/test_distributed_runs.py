"""Twenty steps with random turns on 1, 2 and 4 processes, with DDP and with FSDP2: one run; and what they save."""

import json

import pytest
import torch
from conftest import SHORT_TEMPLATE, byte_tokenizer, tiny_model
from launching import by_rank, launch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM


pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RUNS = [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]
SCENARIOS = {
    1: ("comb", "rows", "lora", "checkpointing"),
    2: ("comb", "rows", "lora", "checkpointing", "sampling", "saving", "saving_lora"),
    4: ("comb", "lora", "sampling"),
}


@pytest.fixture(scope="module")
def uneven_folder(tmp_path_factory) -> str:
    """The tiny model with 50 ids that end a turn, so that what it samples is now short, now long."""
    folder = str(tmp_path_factory.mktemp("uneven"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHORT_TEMPLATE
    model = tiny_model(tokenizer)
    # Control characters and halves of characters: no script writes them.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(200, 250)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(uneven_folder, tmp_path_factory):
    """`results(config, num_processes)` runs all scenarios of that many processes, once, and gives what they wrote."""
    done = {}

    def run(config, num_processes):
        key = config, num_processes
        if key not in done:
            output = tmp_path_factory.mktemp(f"{config}-{num_processes}")
            recipe = None if config == "ddp" else config
            scenarios = SCENARIOS[num_processes]
            done[key] = launch(num_processes, uneven_folder, output, *scenarios, config=recipe, timeout=500)
            done[key]["folder"] = output
        return done[key]

    return run


def joined(processes, name) -> list:
    """A list per step and rank to one list per step, in the order of the ranks."""
    return [sum(parts, []) for parts in zip(*(process[name] for process in processes), strict=True)]


def numbers(value) -> list[float]:
    """All numbers of nested lists in order, `None` as a number that no credit is."""
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [-99.0 if value is None else value]


@pytest.mark.parametrize(
    ("config", "num_processes", "scenario"),
    [(*run, name) for run in RUNS for name in SCENARIOS[1] if name in SCENARIOS[run[1]]],
)
def test_any_number_of_processes_is_one_run(config, num_processes, scenario, results, uneven_folder):
    """Whatever turns each process has: in step, and with the credit and the weights of a single process."""
    (single,) = by_rank(results("ddp", 1), scenario, 1)
    processes = by_rank(results(config, num_processes), scenario, num_processes)
    assert all(process["sharded"] == (config == "fsdp2") for process in processes)
    assert all(process["steps"] == (3 if scenario == "checkpointing" else 20) for process in [single, *processes])
    assert {process["scorer"] for process in processes} == {"RowScorer" if scenario == "rows" else "CombScorer"}
    # What the test is about: turns, and generated lengths, that differ between the processes.
    assert all(process["turns"] != processes[0]["turns"] for process in processes[1:])
    assert all(process["generated"] != processes[0]["generated"] for process in processes[1:])

    # The same forwards and backwards in the same order; where each forward gathers weights, those of `generate` too.
    assert {process["order"] for process in processes} == {processes[0]["order"]}
    assert joined(processes, "turns") == single["turns"]
    assert numbers(joined(processes, "advantages")) == pytest.approx(numbers(single["advantages"]), abs=1e-6)
    assert numbers(joined(processes, "memory_rewards")) == pytest.approx(numbers(single["memory_rewards"]), abs=1e-6)
    # The rewards of a random model are about 1e-5, of which the ε of 1e-4 makes advantages: ten thousand times the
    # rounding of a probability.
    expected = numbers(single["memory_advantages"])
    assert numbers(joined(processes, "memory_advantages")) == pytest.approx(expected, abs=1e-3)
    assert max(abs(number) for number in expected if number != -99.0) > 0.05

    before = AutoModelForCausalLM.from_pretrained(uneven_folder).state_dict()
    moved = 0.0
    for name, weight in single["weights"].items():
        for process in processes:
            torch.testing.assert_close(
                torch.tensor(process["weights"][name]), torch.tensor(weight), rtol=1e-4, atol=2e-6
            )
        if name in before:
            moved = max(moved, (before[name].flatten()[:50] - torch.tensor(weight)).abs().max().item())
    assert scenario in ("lora", "checkpointing") or moved > 1e-3


@pytest.mark.parametrize(("config", "num_processes"), RUNS)
def test_processes_sample_differently(config, num_processes, results):
    """No two rollouts of a group are the same, on whatever processes they were sampled."""
    processes = by_rank(results(config, num_processes), "sampling", num_processes)
    steps = joined(processes, "completions")
    assert len(steps) == 20
    for group in steps:
        assert len(group) == 4
        # Turns of one or two tokens out of 267 may be the same by chance.
        long = [tuple(ids) for ids in group if len(ids) > 3]
        assert len(set(long)) == len(long)
    assert sum(len(ids) > 3 for group in steps for ids in group) > 20


@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_saved_models_load_anywhere(config, results):
    """Checkpoints and the final model hold whole weights in the usual format; the last checkpoint is the final one."""
    run = results(config, 2)
    first, second = by_rank(run, "saving", 2)
    assert first == second
    folder = run["folder"] / "saving"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    for name in ("final", "checkpoint-2"):
        check_weights(AutoModelForCausalLM.from_pretrained(folder / name), first["weights"])


@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_saved_adapters_load_anywhere(config, results):
    """The same for an adapter: only its weights are saved, and PEFT loads it."""
    run = results(config, 2)
    first, second = by_rank(run, "saving_lora", 2)
    assert first == second
    for name in ("final", "checkpoint-2"):
        folder = run["folder"] / "saving_lora" / name
        assert (folder / "adapter_model.safetensors").is_file()
        assert not (folder / "model.safetensors").exists()
        assert json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"] == 4
        check_weights(AutoPeftModelForCausalLM.from_pretrained(folder), first["weights"])


def check_weights(model, expected) -> None:
    """Every weight that was trained is in the loaded model as it was."""
    found = dict(model.named_parameters())
    assert expected.keys() <= found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].detach().flatten()[:50], torch.tensor(weight), rtol=0, atol=0)


@pytest.mark.parametrize("where", ["engine", "scoring"])
def test_a_failure_ends_all_with_sharded_weights(where, uneven_folder, tmp_path):
    """A process that leaves the others in the middle of a gather of weights: they end and name the cause."""
    results = launch(2, uneven_folder, tmp_path, f"failing_{where}", config="fsdp2", timeout=120)
    assert results["returncode"] != 0
    assert f"[rank1]: ArithmeticError: no {where} today" in results["output"]
    assert f"[RANK 0] Process 1 failed: ArithmeticError: no {where} today" in results["output"]
