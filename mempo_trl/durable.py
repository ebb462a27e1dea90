"""What a run of a week needs of the trainer, whatever it trains."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from datasets import IterableDataset
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints
from trl import GRPOTrainer

from .checkpoints import (
    check_same_run,
    find_checkpoint,
    in_generation_batch,
    load_generation_batch,
    read_manifest,
    save_generation_batch,
    write_manifest,
)
from .processes import FailureWatch, check_tool_timeout
from .provenance import training_settings


logger = get_logger(__name__)


class DurableTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] for runs of a week: a resumed run is the one that was interrupted, and a step without signal
    changes nothing.

    To TRL's checkpoints it adds the generation batch in work, and what tells that they are complete and of this run. On
    resume it finds the order of the questions again, in later epochs too. An error on one process ends all of them, with
    its cause.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_tool_timeout(self.args, self.accelerator.num_processes)
        self._watch = FailureWatch()
        if self.is_fsdp_enabled:
            # Each forward gathers weights, so all processes have to make as many; `generate` doesn't see it by itself.
            self.model.generate = partial(self.model.generate, synced_gpus=True)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ):
        """
        Train.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint, or `True` for the last complete one in `output_dir`.
            trial (*optional*), ignore_keys_for_eval (*optional*):
                As in [`~transformers.Trainer.train`].

        Returns:
            `TrainOutput`

        Raises:
            ValueError: If there is no complete checkpoint, or it is one of other questions or in another order.
        """
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        self._step_in_work = None
        self._settings = training_settings(self.args, self.model, self._tokenizer, self.train_dataset)
        if checkpoint is not None:
            check_same_run(read_manifest(checkpoint), self._settings, checkpoint, not self.args.ignore_data_skip)
            if self.args.sync_ref_model:
                logger.warning("The reference starts again from the model's first weights: no checkpoint holds it.")
        elif folders := sort_checkpoints(self.args.output_dir):
            logger.warning(
                f"This run starts anew in {self.args.output_dir!r}, which holds checkpoints of an earlier one (the last "
                f"is {os.path.basename(folders[-1])!r}). A later `resume_from_checkpoint=True` can't tell them apart: "
                "choose another `output_dir`, remove them, or resume."
            )
        with self._watch:
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    def evaluate(self, *args, **kwargs):
        with self._watch:
            return super().evaluate(*args, **kwargs)

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _run_epoch(self, *args, **kwargs):
        # The parent makes one more step of a run that is resumed at its end.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        # The last hook before the optimiser step: after clipping, with the norm over all parameters and processes.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._step_in_work = self.state.global_step
        no_signal = bool(grad_norm == 0)
        self._metrics["train"]["loss/no_signal_frac"].append(float(no_signal))
        # (DeepSpeed has made its step already.)
        if no_signal and self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            # Weight decay and momentum would move the weights without one. Optimisers skip what has no gradient.
            model.zero_grad(set_to_none=True)
            logger.warning_once(
                "A step has no signal: its gradient is exactly 0 (all rewards of a group are equal and no memory "
                "reward differs). Such steps leave the weights as they are; `loss/no_signal_frac` counts them."
            )
        return grad_norm

    def _save_checkpoint(self, model, trial):
        output_dir = self._get_output_dir(trial)
        folder = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            # An older checkpoint in this folder must not say that the new one is complete.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            free = shutil.disk_usage(output_dir).free
            raise RuntimeError(
                f"{str(folder)!r} could not be saved, with {free / 1e9:.1f} GB free on the disk: {error} Make room and "
                "go on from the last complete checkpoint, with `resume_from_checkpoint=True`."
            ) from error

    def _save_before_stop(self) -> str:
        """Save the steps that are done, on all processes, and say how to go on with them."""
        folder = os.path.join(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        exists = any(gather_object([os.path.isdir(folder)]))  # before a process begins to write it
        wanted = self.model.training and self.state.global_step > 0 and self.args.save_strategy != SaveStrategy.NO
        if wanted and not exists:
            self._save_checkpoint(self.model, trial=None)
        return f"go on with `resume_from_checkpoint={folder!r}`" if wanted or exists else "start again"

    def _save_rng_state(self, output_dir):
        # The last that every process saves, before the main process writes the trainer's state.
        super()._save_rng_state(output_dir)
        micro_step = self._step
        if self._step_in_work == self.state.global_step:  # saved on SIGTERM, before the optimiser's step
            micro_step -= self.current_gradient_accumulation_steps
        if micro_step % self._settings["generate_every"]:
            save_generation_batch(self._buffered_inputs, self._generation_batch_path(output_dir))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(output_dir, self._settings, micro_step)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        manifest = read_manifest(checkpoint)
        if in_generation_batch(manifest) and not self.args.ignore_data_skip:
            self._step = manifest["micro_step"]
            self._buffered_inputs = load_generation_batch(
                self._generation_batch_path(checkpoint), self.accelerator.device
            )
        if isinstance(self.train_dataset, IterableDataset):
            if self.state.epoch >= 1 and not self.args.ignore_data_skip:
                raise ValueError(
                    "The data set is a stream that the run had read to its end and started again, and where it was in "
                    "it can't be found. Use a `Dataset`, or go on from its first question with `ignore_data_skip`."
                )
        else:
            for _ in range(int(self.state.epoch)):  # every epoch has an order of its own, drawn when it starts
                next(iter(self._train_sampler))

    def _generation_batch_path(self, folder: str) -> str:
        return os.path.join(folder, f"generation_batch_{self.accelerator.process_index}.safetensors")
