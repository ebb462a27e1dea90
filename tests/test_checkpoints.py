"""Which checkpoint is taken, whether it is of the same run, and what a full disk leaves."""

import contextlib
import inspect
import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from resumable import LAYOUTS, dumped, make, questions
from transformers import PrinterCallback, Trainer
from trl import GRPOTrainer

from mempo_trl.checkpoints import MANIFEST, check_same_run, find_checkpoint, read_manifest
from mempo_trl.monitoring import RolloutWriter


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
