"""
A process of `test_resume.py`: `torchrun --nproc_per_node N resume_run.py MODEL OUTPUT SCENARIO`.

`whole` trains six steps; `waits` stops for good in the middle of the fourth, to be killed; `resumes` goes on from the
last checkpoint; `quiet` has a signal on one process only, and then on none.
"""

import faulthandler
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from resumable import LAYOUTS, dumped, make
from transformers import TrainerCallback


class Waits(TrainerCallback):
    """Waits to be killed when the rollouts of a step are played and its update is not made."""

    def __init__(self, marker):
        self.marker = marker

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.marker.touch()
            time.sleep(300)


def weights_of(model) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


class Weights(TrainerCallback):
    """Hashes of the weights after each step."""

    def __init__(self):
        self.hashes = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.hashes.append(weights_of(model))


def main():
    folder, output, scenario = sys.argv[1:]
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.dump_traceback_later(200, exit=True)  # a deadlock ends with a trace instead of a time-out
    weights = Weights()
    if scenario == "quiet":
        trainer = make(folder, output, max_steps=2, save_strategy="no", callbacks=[weights], beta=0.0)
        calls = iter([[0.0, float(rank)], [0.7, 0.7]])
        trainer.reward_funcs = [lambda completions, **kwargs: next(calls)]
    else:
        # A group is split over the processes, and a checkpoint after the third step has half a generation batch.
        settings = {**LAYOUTS["in the middle"], "per_device_train_batch_size": 2 // processes, "num_generations": 2}
        callbacks = [weights, *([Waits(Path(output, f"waits-{rank}"))] if scenario == "waits" else [])]
        trainer = make(folder, output, callbacks=callbacks, **settings)
    trainer.train(resume_from_checkpoint=scenario == "resumes")
    result = {
        "steps": trainer.state.global_step,
        "weights": weights_of(trainer.model),
        "hashes": weights.hashes,
        "random": torch.get_rng_state().tolist(),
        "rates": [log["learning_rate"] for log in trainer.state.log_history if "loss" in log],
        "no_signal": [log["loss/no_signal_frac"] for log in trainer.state.log_history if "loss" in log],
        "tokens": trainer.state.num_input_tokens_seen,
        "rollouts": dumped(output, f"train-*-rank{rank}.jsonl"),
    }
    Path(output, f"{scenario}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
