"""Checkpoints: a resumed run is the unbroken one, a half-saved checkpoint is never taken, other settings are named."""

import contextlib
import inspect
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from conftest import ScriptedTrainer, build, call, config, search
from datasets import Dataset
from hub_server import TOKEN, HubServer
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import GRPOTrainer

from mempo_trl import MemPOTrainer
from mempo_trl.checkpoints import MANIFEST, SENTINEL, check_same_run, find_checkpoint, read_manifest
from mempo_trl.monitoring import RolloutWriter


def questions(count: int = 4) -> Dataset:
    rows = {"question": [f"What is pet {i}?" for i in range(count)], "golden_answers": [["cat"]] * count}
    return Dataset.from_dict(rows)


def variety(completion_ids, **kwargs):
    """A reward that tells the texts of a random model apart."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def random_script(number, turn):
    """Rollouts of three turns that depend on the state of the random numbers."""
    if turn == 0:
        return call("a")
    word = "abcd"[torch.randint(4, ()).item()]
    return f"<mem>{word}</mem>" + (call("b") if turn == 1 else f"<answer>{'cat' if word < 'c' else word}</answer>")


def make(folder, output_dir, kind="sampled", **kwargs):
    """A trainer on few questions, which samples from the tiny model or draws written turns."""
    settings = dict(save_strategy="steps", save_steps=1, max_steps=6, weight_decay=0.1, learning_rate=0.01)
    settings |= dict(callbacks=[], data=questions()) | kwargs
    if kind == "scripted":
        return build(folder, output_dir, random_script, trainer_class=ScriptedTrainer, **settings)
    given = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "peft_config") if name in settings}
    return MemPOTrainer(
        folder,
        reward_funcs=variety,
        train_dataset=settings.pop("data"),
        args=config(output_dir, max_completion_length=8, **settings),
        tools=[search],
        **given,
    )


def dumped(output_dir, pattern="train-*.jsonl"):
    """All rollouts in the order in which they were played, as `(step, question, completions)`."""
    lines = [line for path in sorted(Path(output_dir, "rollouts").glob(pattern)) for line in open(path)]
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["question"], [turn["completion"] for turn in r["turns"]]) for r in records]


def outcome(trainer):
    """What two runs are compared by."""
    timeless = [
        {name: value for name, value in log.items() if "time" not in name and "latency" not in name}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    return {
        "steps": trainer.state.global_step,
        "logs": timeless,  # with the learning rates, the norms of the gradients and the tokens so far
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "rollouts": dumped(trainer.args.output_dir),
    }


def assert_same(actual, expected):
    for name in ("steps", "logs", "random", "rollouts"):
        assert actual[name] == expected[name], name
    for name, weight in expected["weights"].items():
        assert torch.equal(actual["weights"][name], weight), name


class Dies(TrainerCallback):
    """Ends the process of thought in the middle of a step: its rollouts are played, its update is not made."""

    def __init__(self, at):
        self.at = at

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise ConnectionAbortedError("gone")


class Terminated(Dies):
    """Saves a checkpoint there before, as transformers does on SIGTERM with `enable_jit_checkpoint`."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(exist_ok=True)
            (folder / SENTINEL).write_text("in progress")
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            (folder / SENTINEL).unlink()
        super().on_pre_optimizer_step(args, state, control)


# Two rollouts of a question per micro-batch. Four questions are four micro-batches, so that five steps are more than one
# epoch in all cases, and every epoch has an order of its own.
LAYOUTS = {
    "a batch per step": dict(),
    "two micro-batches": dict(gradient_accumulation_steps=2),
    # Generated once for two steps, and trained on twice: steps 1 to 3 of four are in the middle.
    "in the middle": dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, beta=0.1),
    "two batches per step": dict(gradient_accumulation_steps=2, steps_per_generation=1),
    "uneven": dict(gradient_accumulation_steps=2, steps_per_generation=3, num_iterations=1),
}


@pytest.mark.parametrize(
    "layout, kind, at",
    [
        pytest.param("a batch per step", "sampled", 3, marks=pytest.mark.slow),
        pytest.param("two micro-batches", "scripted", 4, marks=pytest.mark.slow),
        pytest.param("in the middle", "sampled", 1, marks=pytest.mark.slow),
        ("in the middle", "scripted", 3),
        pytest.param("two batches per step", "scripted", 3, marks=pytest.mark.slow),
        pytest.param("uneven", "sampled", 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(layout, kind, at, short_folder, tmp_path):
    """
    Wherever a run dies: after the resume the same questions in the same order, the same rollouts, learning rates,
    metrics, random states and weights, bit for bit; and the dump holds each rollout once.
    """
    settings = dict(kind=kind, max_steps=5, **LAYOUTS[layout])
    unbroken = make(short_folder, tmp_path / "unbroken", **settings)
    unbroken.train()
    expected = outcome(unbroken)
    assert expected["logs"][-1]["grad_norm"] > 0 and len({question for _, question, _ in expected["rollouts"]}) == 4

    dying = make(short_folder, tmp_path / "broken", **{**settings, "callbacks": [Dies(at)]})
    with pytest.raises(ConnectionAbortedError):
        dying.train()
    torch.manual_seed(12345)  # another process has another state
    resumed = make(short_folder, tmp_path / "broken", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed), expected)


@pytest.mark.slow
def test_saved_on_sigterm(short_folder, tmp_path):
    """In the middle of a step: its update is not made, so it is made again, from the same half of the batch."""
    settings = dict(kind="scripted", max_steps=4, **LAYOUTS["in the middle"])
    unbroken = make(short_folder, tmp_path / "unbroken", **settings)
    unbroken.train()
    dying = make(short_folder, tmp_path / "broken", **settings | dict(callbacks=[Terminated(1)], save_steps=10))
    next(c for c in dying.callback_handler.callbacks if isinstance(c, Terminated)).trainer = dying
    with pytest.raises(ConnectionAbortedError):
        dying.train()
    assert read_manifest(tmp_path / "broken" / "checkpoint-1")["micro_step"] == 2
    resumed = make(short_folder, tmp_path / "broken", **settings)
    resumed.train(resume_from_checkpoint=True)
    for name, weight in unbroken.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), weight), name
    assert dumped(tmp_path / "broken") == dumped(tmp_path / "unbroken")


def test_a_resume_near_the_start_of_a_later_epoch(short_folder, tmp_path):
    """At the end of an epoch too: the next one has an order of its own, which no state of a checkpoint holds."""
    unbroken = make(short_folder, tmp_path / "unbroken", learning_rate=0.0)
    unbroken.train()
    asked = [question for _, question, _ in dumped(tmp_path / "unbroken")]
    assert len(set(asked[:8])) == 4 and asked[8:] != asked[:4]  # four steps are an epoch
    for step in (4, 5):
        shutil.copytree(tmp_path / "unbroken", tmp_path / f"from {step}")
        resumed = make(short_folder, tmp_path / f"from {step}", learning_rate=0.0)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"from {step}" / f"checkpoint-{step}"))
        assert_same(outcome(resumed), outcome(unbroken))


@pytest.mark.slow
def test_a_stream_is_resumed_within_its_first_pass(short_folder, tmp_path, caplog):
    """A stream goes on where it was; one that had started again is refused, for where it was can't be found."""
    settings = dict(data=questions().to_iterable_dataset(), shuffle_dataset=False)
    unbroken = make(short_folder, tmp_path, max_steps=3, **settings)
    unbroken.train()
    expected = outcome(unbroken)
    assert [question for _, question, _ in expected["rollouts"]] == [f"What is pet {i}?" for i in (0, 0, 1, 1, 2, 2)]
    resumed = make(short_folder, tmp_path, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(outcome(resumed), expected)

    make(short_folder, tmp_path / "twice", max_steps=6, **settings).train()
    again = make(short_folder, tmp_path / "twice", max_steps=6, **settings)
    with pytest.raises(ValueError, match="stream that the run had read to its end"):
        again.train(resume_from_checkpoint=str(tmp_path / "twice" / "checkpoint-5"))


def test_resuming_a_finished_run_changes_nothing(short_folder, tmp_path):
    """No further step, as a supervisor that starts the command again would get otherwise."""
    finished = make(short_folder, tmp_path, max_steps=2)
    finished.train()
    again = make(short_folder, tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and len(dumped(tmp_path)) == 4
    for name, weight in finished.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), weight)


# Which checkpoint


@pytest.fixture(scope="module")
def saved(short_folder, tmp_path_factory) -> Path:
    """The folder of a run of three steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("saved")
    make(short_folder, folder, max_steps=3, learning_rate=0.0).train()
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_checkpoint_with_anything_missing_is_not_taken(copy, caplog):
    """Whatever file a kill left out, cut or emptied: the checkpoint before is taken, and the log says why."""
    last, before = copy / "checkpoint-3", str(copy / "checkpoint-2")
    names = [path.name for path in last.iterdir()]
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= set(names)
    for name in names:
        content = (last / name).read_bytes()
        for damaged in (None, b"", content[:-1], content[: len(content) // 2]):
            if name == MANIFEST and damaged == content[:-1]:  # without the end of its last line it says the same
                continue
            if name == "trainer_state.json" and damaged == content[:-1]:
                continue
            (last / name).unlink()
            if damaged is not None:
                (last / name).write_bytes(damaged)
            caplog.clear()
            assert find_checkpoint(True, str(copy)) == before, (name, damaged and len(damaged))
            assert f"{str(last)!r} is no complete checkpoint: {name!r}" in caplog.text
            with pytest.raises(ValueError, match="is no complete checkpoint"):
                find_checkpoint(str(last), str(copy))
            (last / name).write_bytes(content)
    assert find_checkpoint(True, str(copy)) == str(last)


def test_what_can_be_asked_for(copy, tmp_path):
    """A folder, a boolean, the words of a command line; nothing to resume is an error that says so."""
    last = str(copy / "checkpoint-3")
    assert find_checkpoint("True", str(copy)) == find_checkpoint("true", str(copy)) == last
    assert find_checkpoint(copy / "checkpoint-1", "elsewhere") == str(copy / "checkpoint-1")
    assert [find_checkpoint(no, str(copy)) for no in (None, False, "false", "")] == [None] * 4
    with pytest.raises(ValueError, match="no complete checkpoint \\(0 in all\\)"):
        find_checkpoint(True, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("file_number", [*(pytest.param(i, marks=pytest.mark.slow) for i in range(4)), 4])
def test_killed_while_saving(file_number, short_folder, copy, monkeypatch, caplog):
    """
    Killed at the n-th file that PyTorch writes, over a complete checkpoint of the same step: it is not taken for
    complete any more, and the run resumes from the one before to the same end.
    """
    trainer = make(short_folder, copy, max_steps=3, learning_rate=0.0)
    count, save = iter(range(100)), torch.save

    def dying_save(content, path, *args, **kwargs):
        if next(count) == file_number:
            Path(path).write_bytes(b"PK\x03\x04")
            raise KeyboardInterrupt
        save(content, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", dying_save)
    if file_number == 4:  # after all of them, before the state of the trainer
        monkeypatch.setattr(type(trainer.state), "save_to_json", lambda self, path: dying_save(0, path))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    monkeypatch.undo()
    assert find_checkpoint(True, str(copy)) == str(copy / "checkpoint-2")
    resumed = make(short_folder, copy, max_steps=3, learning_rate=0.0)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3 and find_checkpoint(True, str(copy)) == str(copy / "checkpoint-3")


def test_a_checkpoint_without_the_optimizer_is_refused(short_folder, tmp_path):
    """`save_only_model` keeps nothing to resume with; transformers would start the schedule again without a word."""
    make(short_folder, tmp_path, max_steps=1, save_only_model=True).train()
    again = make(short_folder, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="saved with `save_only_model`"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_checkpoints_hold_no_pickle_of_ours(short_folder, tmp_path):
    """The generation batch in work is there where it is needed, as safetensors; the settings hold no token."""
    make(short_folder, tmp_path, max_steps=4, hub_token="hf_dummy", **LAYOUTS["in the middle"]).train()
    held = {path.parent.name for path in tmp_path.glob("checkpoint-*/generation_batch_0.safetensors")}
    assert held == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert read_manifest(tmp_path / "checkpoint-1")["micro_step"] == 2
    assert "hf_dummy" not in (tmp_path / "checkpoint-1" / MANIFEST).read_text()


# The same run


def test_a_changed_setting_is_named(short_folder, copy, caplog):
    """λ, learning rate and adapter may change, and the log says what was and what is; paths and logging may move."""
    settings = dict(memory_advantage_weight=0.5, learning_rate=0.001, logging_steps=2, run_name="again")
    make(short_folder, copy, max_steps=4, **settings).train(resume_from_checkpoint=True)
    (line,) = (record.getMessage() for record in caplog.records if "other settings" in record.getMessage())
    named = line.split("settings: ")[1].rstrip(".").split("; ")
    assert sorted(named) == [
        "`learning_rate` was 0.0 and is 0.001 now",
        "`max_steps` was 3 and is 4 now",
        "`memory_advantage_weight` was 1.0 and is 0.5 now",
    ]
    caplog.clear()
    make(short_folder, copy, max_steps=4, **settings).train(resume_from_checkpoint=True)
    assert "other settings" not in caplog.text


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(data=questions(5)), "questions"),
        pytest.param(dict(seed=1), "seed", marks=pytest.mark.slow),
        pytest.param(dict(shuffle_dataset=False), "shuffle_dataset", marks=pytest.mark.slow),
        pytest.param(
            dict(num_generations=4, per_device_train_batch_size=4), "num_generations", marks=pytest.mark.slow
        ),
        (dict(steps_per_generation=2), "generation_batch_size"),
        pytest.param(dict(num_iterations=2), "steps_per_generation_batch", marks=pytest.mark.slow),
    ],
)
def test_another_order_of_questions_is_refused(change, named, short_folder, copy):
    """What would leave questions out and ask others twice is an error that names it; `ignore_data_skip` allows it."""
    trainer = make(short_folder, copy, max_steps=4, **change)
    with pytest.raises(ValueError, match=f"order of the questions is another: `{named}` was"):
        trainer.train(resume_from_checkpoint=True)
    trainer.args.ignore_data_skip = True
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_fewer_processes_can_go_on_between_generation_batches_only(copy):
    """Two processes instead of one: the same questions, other random numbers; not with half of a batch each."""
    manifest = read_manifest(copy / "checkpoint-3")
    now = json.loads(json.dumps(manifest["settings"]))
    now["layout"]["num_processes"] = 2
    check_same_run(manifest, now, "here", data_skip=True)
    manifest["settings"]["generate_every"] = now["generate_every"] = 2  # it was saved after three micro-batches
    with pytest.raises(ValueError, match="in the middle of a generation batch.*`num_processes` was 1 and is 2 now"):
        check_same_run(manifest, now, "here", data_skip=True)


def test_starting_anew_where_a_run_was(short_folder, copy, caplog):
    """The checkpoints of the earlier run are named, and its rollouts put aside: the dump is that of one run."""
    earlier = dumped(copy)
    make(short_folder, copy, max_steps=1, learning_rate=0.0).train()
    assert "holds checkpoints of an earlier one (the last is 'checkpoint-3')" in caplog.text
    assert dumped(copy) == earlier[:2]
    assert sorted(path.name for path in (copy / "rollouts" / "replaced").iterdir()) == [
        f"train-00000{step}-rank0.jsonl" for step in range(3)
    ]


def test_rollouts_of_a_step_that_is_played_again(tmp_path):
    """A resume at step 4: its training rollouts come after the checkpoint, its evaluation came before it."""
    writer = RolloutWriter(tmp_path, process_index=1)
    for mode in ("train", "eval"):
        for step in (3, 4, 5):
            for rank in range(4):
                (tmp_path / f"{mode}-{step:06d}-rank{rank}.jsonl").write_text("{}\n")
    writer.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(global_step=4), None)
    moved = {path.name for path in (tmp_path / "replaced").iterdir()}
    # Process 1 of 2 sees to its own files and to those of the process 3 that is no more.
    assert moved == {
        f"{mode}-{step:06d}-rank{rank}.jsonl"
        for mode, step in (("train", 4), ("train", 5), ("eval", 5))
        for rank in (1, 3)
    }


# Other options


@pytest.mark.slow
def test_limit_and_best_model(short_folder, tmp_path):
    """`save_total_limit` with `load_best_model_at_end`: the best and the last stay, also over a resume."""
    rewards = iter([3.0, 1.0, 2.0, 0.0])

    def given(completions, **kwargs):
        return [scripted.pop(0) if evaluating else float(i % 2) for i in range(len(completions))]

    scripted, evaluating = [], False

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            nonlocal evaluating
            scripted[:] = [next(rewards)] * 8
            evaluating = True

        def on_evaluate(self, args, state, control, **kwargs):
            nonlocal evaluating
            evaluating = False

    settings = dict(
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2, save_total_limit=2, max_steps=4,
        load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=True, callbacks=[Evaluates()],
    )  # fmt: skip

    def trainer(*more):
        made = make(
            short_folder, tmp_path, eval_dataset=questions(2), **{**settings, "callbacks": [Evaluates(), *more]}
        )
        made.reward_funcs = [given]
        return made

    with pytest.raises(ConnectionAbortedError):
        trainer(Dies(2)).train()
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-2"]
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_metric == 3.0 and resumed.state.best_global_step == 1
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-4"]
    for name, weight in best.items():
        assert torch.equal(resumed.model.get_parameter(name), weight)


@pytest.mark.slow
def test_an_adapter_goes_on(short_folder, tmp_path):
    """LoRA with a reference: adapter, optimiser and KL go on where they were."""
    settings = dict(
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), beta=0.5, max_steps=4
    )
    unbroken = make(short_folder, tmp_path, **settings)
    unbroken.train()
    assert unbroken.state.log_history[-2]["kl"] > 0
    expected = outcome(unbroken)
    resumed = make(short_folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(outcome(resumed), expected)


# A full disk


@contextlib.contextmanager
def disk_with(free: int):
    """No file can grow above so many bytes, which is how a full disk looks to the one that writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_while_dumping(short_folder, tmp_path, caplog):
    """Training goes on; one warning, and a metric that counts; no half record is left."""
    trainer = make(short_folder, tmp_path, max_steps=3, save_strategy="no")
    trainer.remove_callback(PrinterCallback)  # the captured output is a file too
    with disk_with(1000):
        trainer.train()
    assert trainer.state.global_step == 3
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["rollout/dump_failed_frac"] for log in logs] == [1.0] * 3
    (line,) = (record.getMessage() for record in caplog.records if "could not be written" in record.getMessage())
    assert "rollouts of step 0" in line and "File too large" in line
    assert [path.stat().st_size for path in (tmp_path / "rollouts").iterdir()] == [0] * 3


def test_a_full_disk_while_saving(short_folder, copy):
    """An error that names the checkpoint, the room and the way on; the one before is complete and is taken."""
    trainer = make(short_folder, copy, max_steps=4, learning_rate=0.0)
    with disk_with(60_000), pytest.raises(RuntimeError, match=r"checkpoint-4' could not be saved, with .* GB free"):
        trainer.train(resume_from_checkpoint=True)
    assert find_checkpoint(True, str(copy)) == str(copy / "checkpoint-3")
    resumed = make(short_folder, copy, max_steps=4, learning_rate=0.0)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


# Processes


def launch(processes, folder, output, scenario):
    """A run of `resume_run.py` in a process group of its own."""
    output.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)),
            *(str(Path(__file__).parent / "resume_run.py"), folder, str(output), scenario),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=open(output / f"{scenario}.log", "w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def results_of(process, processes, output, scenario):
    """What each process of a run wrote."""
    assert process.wait(timeout=240) == 0, (output / f"{scenario}.log").read_text()[-4000:]
    return [json.loads((output / f"{scenario}-{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed(processes, short_folder, tmp_path):
    """
    `kill -9` in the middle of a step, with half a generation batch in the checkpoint: resumed, on one process and on
    two, the run ends with the weights, random states, learning rates and rollouts of the one that was left alone.
    """
    whole = launch(processes, short_folder, tmp_path / "whole", "whole")
    expected = results_of(whole, processes, tmp_path / "whole", "whole")
    output = tmp_path / "killed"
    killed = launch(processes, short_folder, output, "waits")
    deadline = time.monotonic() + 240
    while len(list(output.glob("waits-*"))) < processes:
        assert time.monotonic() < deadline and killed.poll() is None, (output / "waits.log").read_text()[-4000:]
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = launch(processes, short_folder, output, "resumes")
    actual = results_of(resumed, processes, output, "resumes")
    for result, wanted in zip(actual, expected, strict=True):
        assert result["hashes"] == wanted["hashes"][3:]  # it was resumed after the third step, and not from the start
        for name in ("steps", "weights", "random", "rates", "tokens", "rollouts"):
            assert result[name] == wanted[name], name
    assert len({result["weights"] for result in actual}) == 1
    manifest = read_manifest(output / "checkpoint-3")
    assert {f"generation_batch_{rank}.safetensors" for rank in range(processes)} <= set(manifest["files"])


@pytest.mark.slow
def test_processes_agree_on_a_step_without_signal(short_folder, tmp_path):
    """Signal on one of two processes moves both alike; signal on none moves neither, and neither waits for the other."""
    results = results_of(launch(2, short_folder, tmp_path, "quiet"), 2, tmp_path, "quiet")
    assert results[0]["hashes"] == results[1]["hashes"]
    assert results[0]["no_signal"] == [0.0, 1.0]
    assert results[0]["hashes"][0] == results[0]["hashes"][1]


@pytest.mark.slow
def test_a_checkpoint_from_the_hub(short_folder, tmp_path):
    """`hub_strategy="checkpoint"`: what was pushed as `last-checkpoint` is complete, and a run goes on from it."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_resume import make
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = False  # the other tests are offline
hub = dict(push_to_hub=True, hub_model_id="founder/agent", hub_strategy="checkpoint", hub_always_push=True)
make({short_folder!r}, "run", max_steps=2, **hub).train()
"""
    with HubServer() as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": f"{tmp_path}/home", "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_TOKEN": TOKEN}
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        files = hub.repos["founder/agent"]
    folder = tmp_path / "downloaded" / "last-checkpoint"
    for name, content in files.items():
        if name.startswith("last-checkpoint/"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name.removeprefix("last-checkpoint/")).write_bytes(content)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    resumed = make(short_folder, tmp_path / "again", max_steps=3)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 3


# What it hangs on


def test_the_order_of_saving():
    """
    Random states come after all else that every process saves, then the trainer's state, then what deletes older
    checkpoints: a manifest in between says that a checkpoint is complete, and nothing is deleted before.
    """
    source = inspect.getsource(Trainer._save_checkpoint)
    parts = ("self.save_model(", "self._save_optimizer_and_scheduler(", "self._save_scaler(", "self._save_rng_state(")
    parts += ("self.state.save_to_json(", "self._push_from_checkpoint(", "rotate_checkpoints(")
    places = [source.index(part) for part in parts]
    assert places == sorted(places), (
        f"transformers {transformers.__version__} saves in another order: see `durable.py`"
    )


@pytest.mark.parametrize(
    "function, signature",
    [
        (Trainer.train, ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"]),
        (Trainer._save_checkpoint, ["model", "trial"]),
        (Trainer._save_rng_state, ["output_dir"]),
        (Trainer._load_optimizer_and_scheduler, ["checkpoint"]),
        (Trainer._get_grad_norm, ["model", "grad_norm"]),
        (Trainer._get_output_dir, ["trial"]),
        (GRPOTrainer._get_train_sampler, ["dataset"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_names_of_the_parents(function, signature):
    """What `DurableTrainer` overrides and calls takes what it is given."""
    parameters = list(inspect.signature(function).parameters)
    assert parameters[1 : len(signature) + 1] == signature, f"`{function.__qualname__}` has changed: see `durable.py`"


def test_order_of_a_step():
    """The norm is taken before the optimiser's step, and the count of steps goes up after it."""
    source = inspect.getsource(Trainer._run_epoch)
    parts = ("self._get_grad_norm(", "on_pre_optimizer_step(", "self.optimizer.step()", "self.state.global_step += 1")
    places = [source.index(part) for part in parts]
    assert places == sorted(places), f"transformers {transformers.__version__} has another step: see `durable.py`"
