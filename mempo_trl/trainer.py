"""[`MemPOTrainer`]: glue between TRL's hooks and the rollouts, memory rewards and sequences of this package."""

import math
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.utils import get_config_model_id

from .advantages import standardize_memory_rewards, token_advantages, without_spread
from .alarms import AlarmCallback
from .batching import batch_by_length, forward_by_length, recompute_contexts, split_to_count
from .comb import choose_scorer
from .config import MemPOConfig
from .data.objectives import check_row, golden_answers_of
from .durable import DurableTrainer
from .endpoints import CompletionsGenerator
from .generation import BatchGenerator, run_in_event_loop
from .inputs import check_data, check_loaded, check_model, check_tokenizer
from .memory_reward import MemoryRewardCallback, RolloutCallback, stack_memory_rewards
from .model_card import complete_model_card
from .monitoring import (
    RolloutBar,
    RolloutWriter,
    last_tool_failure,
    length_metrics,
    rollout_record,
    rollout_statistics,
    total_tokens,
)
from .policy_servers import AdapterGenerator, check_adapter, policy_generator
from .processes import on_all_processes
from .protocol import Protocol, load_chat_template
from .retrieval.cache import CachedRetriever
from .retrieval.sharing import SharedSearches
from .retrieval.tool import SearchTool
from .rewards import exact_match_reward
from .rollout import Rollout, exclude_rollouts, play
from .sequences import Sequence, build_sequences, kl_per_sequence, loss_weights, pad_sequences, padded_count
from .timing import StepTimer, TimingCallback, device_clock, step_phases, within
from .tools import Toolbox


logger = get_logger(__name__)


class MemPOTrainer(DurableTrainer):
    """
    Trainer for Self-Memory Policy Optimization (MemPO, https://huggingface.co/papers/2603.00680).

    It plays multi-turn search rollouts in which every turn writes a memory and sees only the last turn, and trains
    with GRPO plus a memory advantage on the memory tokens.

    Example:

    ```python
    from datasets import load_dataset
    from mempo_trl import BM25Retriever, MemPOConfig, MemPOTrainer, SearchTool

    trainer = MemPOTrainer(
        model="Qwen/Qwen2.5-7B-Instruct",
        args=MemPOConfig("Qwen2.5-7B-MemPO"),
        train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
        tools=[SearchTool(BM25Retriever.from_corpus("corpus.jsonl"))],
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy. An adapter that is trained already goes on from where it is; with `beta > 0` it is also the
            reference.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions in TRL's form. They get the dataset's columns, `completions` as messages, `completion_ids`
            with the sampled ids of all turns, and `rollouts`, each one entry per rollout. Defaults to
            [`~mempo_trl.rewards.exact_match_reward`].
        args ([`MemPOConfig`], *optional*):
            Configuration.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with `question` (`str`) and `golden_answers`: a list of aliases, or a list of such lists for several
            objectives.
        eval_dataset (*optional*):
            The same for evaluation.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer. Defaults to the model's.
        reward_processing_classes (*optional*), callbacks (*optional*), optimizers (*optional*), quantization_config (*optional*), peft_config (*optional*):
            As in [`~trl.GRPOTrainer`]. A callback that is a [`MemoryRewardCallback`] or an
            [`~mempo_trl.alarms.AlarmCallback`] replaces the default one.
        tools (`list[Callable]`):
            The tools: typed, documented functions or callables, sync or async.

    Raises:
        ValueError: If a column, an answer, a template or an option can't be used; the message names it and the remedy.
    """

    _tag_names = ["trl", "mempo"]
    _name = "MemPO"
    _paper = {
        "title": "MemPO: Self-Memory Policy Optimization for Long-Horizon Agents",
        "id": "2603.00680",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{li2026mempo,
                title        = {{MemPO: Self-Memory Policy Optimization for Long-Horizon Agents}},
                author       = {Ruoran Li and Xinghua Zhang and Haiyang Yu and Shitong Duan and Xiang Li and Wenxin Xiang and Chonghua Liao and Xudong Guo and Yongbin Li and Jinli Suo},
                year         = 2026,
                eprint       = {arXiv:2603.00680},
            }"""),
    }

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any | list[Any] | None = None,
        args: MemPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable] | None = None,
        rollout_func: None = None,
        environment_factory: None = None,
    ):
        if not isinstance(args, MemPOConfig | None):
            raise TypeError(f"`args` must be a `MemPOConfig`, got `{type(args).__name__}`.")
        check_model(model, peft_config, MemPOConfig.beta if args is None else args.beta)
        model_id = model if isinstance(model, str) else get_config_model_id(model.config)
        if args is None:
            args = MemPOConfig(f"{model_id.split('/')[-1]}-MemPO")
        if rollout_func is not None or environment_factory is not None:
            name = "rollout_func" if rollout_func is not None else "environment_factory"
            raise ValueError(f"`{name}` is not supported: MemPOTrainer plays its own rollouts. Pass `tools` instead.")

        if processing_class is None:
            init_kwargs = args.model_init_kwargs or {}
            processing_class = AutoTokenizer.from_pretrained(
                model_id,
                revision=init_kwargs.get("revision"),
                padding_side="left",
                trust_remote_code=args.trust_remote_code,
            )
        if not isinstance(processing_class, PreTrainedTokenizerBase):
            raise ValueError(
                f"`processing_class` is a `{type(processing_class).__name__}`: images are not supported. Pass the "
                "tokenizer of a text model."
            )
        check_tokenizer(processing_class)
        if args.chat_template_path is not None:
            processing_class.chat_template = load_chat_template(args.chat_template_path)
        self.toolbox = Toolbox(tools or [], timeout=args.tool_timeout, retries=args.tool_retries)
        # Before the weights are loaded, so that a template that can't be used is an error at once.
        self.protocol = Protocol(
            processing_class,
            self.toolbox,
            context=args.context,
            system_prompt=args.system_prompt,
            chat_template_kwargs=args.chat_template_kwargs,
            max_tool_response_length=args.max_tool_response_length,
        )
        self._needs_answers = reward_funcs is None or args.memory_advantage_weight > 0
        reward_funcs = [exact_match_reward] if reward_funcs is None else reward_funcs
        datasets = check_data(train_dataset, eval_dataset, args, reward_funcs, needs_answers=self._needs_answers)

        # With `vllm_mode="server"` every turn is a request of its own. An adapter goes to the servers as it is; only the
        # weights of a full model go there by TRL's client.
        uses_server = args.use_vllm and args.vllm_mode == "server"
        adapter_config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else peft_config
        serves_adapter = uses_server and adapter_config is not None
        if serves_adapter:
            check_adapter(adapter_config)
            args.use_vllm = False
        elif args.vllm_server_urls is not None:
            raise ValueError(
                f"`vllm_server_urls` is {args.vllm_server_urls}: several servers take an adapter only. Pass a "
                "`peft_config`, or train the full model with one server (`vllm_server_base_url`)."
            )
        try:
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
        finally:  # an error must not leave the user's arguments changed
            args.use_vllm |= serves_adapter
        if serves_adapter:
            self.use_vllm = True  # what it samples is corrected for in the loss
        # The model may declare more ids that end a turn than the tokenizer does.
        self.protocol.set_eos_token_ids(self.eos_token_ids)
        # A cut turn is one turn of a rollout here, and not always the end of a row: the sequences take care of it.
        self._mask_truncated_rollouts = self.mask_truncated_completions
        self.mask_truncated_completions = False
        self._server: CompletionsGenerator | None = None
        served_length = None
        if uses_server:
            self._server, served_length = policy_generator(
                args, self.eos_token_ids, serves_adapter, self.accelerator.process_index
            )
        self._last_batch = {"train": (-1, 0), "eval": (-1, 0)}  # step, and number of the generation batch within it
        self._max_prompt_length = check_loaded(self.model, self.protocol, args, datasets, served_length)
        self._scorer_type = choose_scorer(self.model, args.memory_scoring)
        if not any(isinstance(callback, MemoryRewardCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(MemoryRewardCallback())
        has_alarms = any(isinstance(callback, AlarmCallback) for callback in self.callback_handler.callbacks)
        if args.alarms and not has_alarms:
            self.add_callback(AlarmCallback())
        self._timer = StepTimer(step_phases(args), device_clock(self.accelerator.device))
        self.add_callback(TimingCallback(self._timer, self._metrics["train"]))
        if self._server is not None:
            self._server.generate = within(self._timer.generating, self._server.generate)
        self._rollout_writer = RolloutWriter(f"{args.output_dir}/rollouts", self.accelerator.process_index)
        self.add_callback(self._rollout_writer)
        searches = [tool for tool in self.toolbox.tools.values() if isinstance(tool, SearchTool)]
        self._caches = [tool.retriever for tool in searches if isinstance(tool.retriever, CachedRetriever)]
        self._cache_counts = (0, 0)  # hits and queries when they were last logged
        # The generation batch in work: rows, rollouts and the sequences they gave.
        self._rows: list[dict] = []
        self._searches = SharedSearches(self.toolbox)
        self._rollouts: list[Rollout] = []
        self._rewards: list[dict[str, float]] = []
        self._sequences: list[Sequence] = []
        self._policy_logps: torch.Tensor | None = None

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*self._signature_columns, "question", "golden_answers"]

    # From here on in the order in which a generation batch meets the methods.

    def get_batch_samples(self, *args, **kwargs):
        self._timer.start("other")
        return super().get_batch_samples(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        for row in inputs:  # of a stream only the first row was checked before
            check_row(row, "A row of the data set", self._needs_answers)
        self._rows = [
            {
                **row,
                "prompt": self.protocol.messages(row["question"]),
                "golden_answers": golden_answers_of(row, required=self._needs_answers),
            }
            for row in inputs
        ]
        with self._timer.phase("other"):  # what the phases inside leave of it
            output = super()._generate_and_score_completions(self._rows)
            self._spread_advantages(output)
            self._write_rollouts()
        self._rows, self._rollouts, self._rewards, self._sequences = [], [], [], []
        return output

    def _generate(self, prompts: list) -> tuple:
        # Returns one entry per sequence for ids, masks and log-probs, but one per rollout for the completions, from
        # which the parent computes the rewards.
        mode = "train" if self.model.training else "eval"
        with self._timer.phase("rollout"):
            rollouts = self._play_rollouts()
        exclude_rollouts(rollouts, self.args.tool_failure)
        self._rollouts = rollouts
        with self._timer.phase("memory_scoring" if self.args.memory_advantage_weight > 0 else "other"):
            self._call_rollout_callbacks()

        sequences = [sequence for i, rollout in enumerate(rollouts) for sequence in build_sequences(rollout, i)]
        for sequence in sequences:
            rollout = rollouts[sequence.rollout_index]
            if rollout.excluded or (self._mask_truncated_rollouts and rollout.outcome == "truncated"):
                sequence.loss_mask = [0] * len(sequence.loss_mask)
            if rollout.excluded and sequence.logps is not None:
                sequence.logps = [0.0] * len(sequence.logps)
        multiple = self.args.steps_per_generation if mode == "train" else 1
        count = padded_count(self._reduce_max([len(sequences)]), multiple)
        num_real = len(sequences)
        self._sequences = sequences = pad_sequences(sequences, count, self.eos_token_ids[0])

        self._log_rollouts(mode, num_real)
        logps = None
        if rollouts[0].turns[0].logps is not None:  # the engine reports them; padding alone knows nothing of it
            logps = [sequence.logps or [0.0] for sequence in sequences]
        return (
            [sequence.prompt_ids for sequence in sequences],
            [sequence.completion_ids for sequence in sequences],
            [sequence.loss_mask for sequence in sequences],
            [rollout.messages() for rollout in rollouts],
            logps,
            {},
            None,
            [],
        )

    def _reduce_max(self, values: list[int]) -> list[int]:
        gathered = self.accelerator.gather(torch.tensor([values], device=self.accelerator.device))
        return gathered.amax(dim=0).tolist()

    def _play_rollouts(self) -> list[Rollout]:
        quiet = self.args.disable_tqdm or not self.accelerator.is_main_process
        bar = RolloutBar(total=len(self._rows), desc="Rollouts", leave=False, disable=quiet)
        if self._server is None:
            generator = self._turn_batches(bar)
        else:
            with self._timer.phase("sync"):
                self._sync_servers()
            mode = "train" if self.model.training else "eval"
            step, batch = self._last_batch[mode]
            step, batch = self.state.global_step, batch + 1 if step == self.state.global_step else 0
            self._last_batch[mode] = step, batch
            generator = self._server
            generator.seed = f"{self.args.seed}/{mode}/{step}/{batch}"  # those of the step: a resumed run has the same
            generator.on_rollout = bar.update
        self._searches = SharedSearches(self.toolbox)
        call_tool = within(self._timer.searching, self._searches.call)
        rollouts = [
            play(
                row["question"],
                row["golden_answers"],
                protocol=self.protocol,
                generator=generator,
                call_tool=call_tool,
                max_turns=self.args.max_turns,
                max_prompt_length=self._max_prompt_length,
            )
            for row in self._rows
        ]
        start = self.accelerator.process_index * len(rollouts)
        numbers = list(range(start, start + len(rollouts)))
        with bar:
            if self._server is None:  # a round of turns is collective itself
                return run_in_event_loop(generator.run(rollouts))
            return on_all_processes(lambda: run_in_event_loop(generator.run(rollouts, numbers)))

    def _sync_servers(self) -> None:
        """The policy as it is now to the servers."""
        if isinstance(self._server, AdapterGenerator):
            self._server.sync(self.model, self.model_wrapped, self.accelerator)
        elif self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def _turn_batches(self, bar: RolloutBar) -> BatchGenerator:
        return BatchGenerator(
            self._generate_turns,
            max_completion_length=self.max_completion_length,
            eos_token_ids=self.eos_token_ids,
            reduce_max=self._reduce_max,
            gather=lambda value: gather_object([value]),
            dummy_prompt=[self.eos_token_ids[0]],
            equal_counts=self.use_vllm,
            on_turn=bar.on_turn,
        )

    def _generate_turns(self, prompts: list[list[int]], idle: bool) -> tuple[list[list[int]], list | None]:
        if not idle or self.use_vllm:
            with self._timer.generating():
                return self._generate_single_turn(prompts, None, {}, num_generations=1)
        # This process only keeps the others company, who may gather sharded weights: one token is enough.
        max_new_tokens = self.generation_config.max_new_tokens
        self.generation_config.max_new_tokens = 1
        try:
            return self._generate_single_turn(prompts, None, {}, num_generations=1)
        finally:
            self.generation_config.max_new_tokens = max_new_tokens

    def _call_rollout_callbacks(self) -> None:
        scorer = self._scorer_type(
            self.model,
            pad_token_id=self._tokenizer.pad_token_id,
            max_tokens=self.args.memory_scoring_max_tokens,
            autocast=self.accelerator.autocast,
            reduce_max=self._reduce_max,
        )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MemoryRewardCallback) and self.args.memory_advantage_weight == 0:
                continue
            if isinstance(callback, RolloutCallback):
                callback.on_rollouts_end(
                    self.args,
                    self.state,
                    self.control,
                    rollouts=self._rollouts,
                    scorer=scorer,
                    processing_class=self._tokenizer,
                )

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # The parent's `completion_ids_list` has an entry per sequence; rewards are per rollout.
        rows = [{**row, "rollouts": rollout} for row, rollout in zip(inputs, self._rollouts, strict=True)]
        completion_ids = [rollout.completion_ids for rollout in self._rollouts]
        rewards_per_func = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        excluded = torch.tensor([rollout.excluded for rollout in self._rollouts], device=rewards_per_func.device)
        rewards_per_func[self.accelerator.gather(excluded)] = torch.nan  # as the parent marks a row without a reward
        weights = self.reward_weights.to(rewards_per_func.device)
        start = self.accelerator.process_index * len(rows)
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        no_spread = without_spread(rewards_per_func, weights, num_generations, self.multi_objective_aggregation)
        self._without_spread = no_spread[start : start + len(rows)]
        own_rewards = rewards_per_func[start : start + len(rows)]
        self._rewards = [dict(zip(self.reward_func_names, row, strict=True)) for row in own_rewards.tolist()]
        for rollout, rewards in zip(self._rollouts, own_rewards, strict=True):
            if not rewards.isnan().all():
                rollout.reward = (rewards * weights).nansum().item()
        return rewards_per_func

    def _spread_advantages(self, output: dict[str, torch.Tensor]) -> None:
        """Per-rollout advantages to one per token, with the weight of each sequence in the loss."""
        mode = "train" if self.model.training else "eval"
        device = output["advantages"].device
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        # Equal rewards may leave rounding noise, which the parent's ε lets through.
        output["advantages"].masked_fill_(self._without_spread, 0.0)
        rewards = stack_memory_rewards(self._rollouts, self.args.max_turns).to(device)  # (R, T)
        memory_advantages = standardize_memory_rewards(
            self.accelerator.gather(rewards), num_generations, self.scale_rewards
        )
        start = self.accelerator.process_index * len(self._rollouts)
        memory_advantages = memory_advantages[start : start + len(self._rollouts)]
        for i, rollout in enumerate(self._rollouts):
            rollout.advantage = output["advantages"][i].item()
            for t, turn in enumerate(rollout.turns):
                if turn.memory_reward is not None:
                    turn.memory_advantage = memory_advantages[i, t].item()

        width = output["completion_ids"].size(1)
        memory_turns = torch.tensor(
            [sequence.memory_turns + [-1] * (width - len(sequence.memory_turns)) for sequence in self._sequences],
            device=device,
        )  # (S, C)
        advantages = token_advantages(
            output["advantages"],
            memory_advantages,
            torch.tensor([sequence.rollout_index for sequence in self._sequences], device=device),
            memory_turns,
            self.args.memory_advantage_weight,
        )
        weights = loss_weights(self._sequences, len(self._rollouts), self.loss_type).to(device)
        # The policy terms of every loss type are homogeneous in the advantage, so that a weight on it weighs the
        # sequence. The KL term is not; `_compute_loss` weighs it.
        output["advantages"] = advantages * weights.unsqueeze(1)  # (S, C)
        output["loss_weights"] = weights

        defined = memory_advantages[~rewards.isnan()].abs()
        totals = self.accelerator.gather(torch.stack([defined.sum(), defined.new_tensor(defined.numel())]))
        total, count = totals.view(-1, 2).sum(dim=0).tolist()
        self._metrics[mode]["memory/advantage_abs_mean"].append(total / count if count else torch.nan)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with self._timer.phase("train" if torch.is_grad_enabled() else "logps"):
            return self._logps_by_length(*args, **kwargs)

    def _logps_by_length(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
        # All forwards of the loss, of the old policy and of the reference come by here, as one padded block. Rows of
        # like length share a forward instead, without the block's padding; the loss sees the block again.
        lengths = attention_mask.sum(dim=1).tolist()  # (B,)
        batches = batch_by_length(lengths, self.args.max_tokens_per_microbatch)
        forwarded = sum(lengths[rows[0]] * len(rows) for rows in batches)
        counts = torch.tensor([len(batches), sum(lengths), forwarded], device=self.accelerator.device)
        counts = self.accelerator.gather(counts.unsqueeze(0))  # (processes, 3)
        batches = split_to_count(batches, lengths, counts[:, 0].max().item())
        _, tokens, forwarded = counts.sum(dim=0).tolist()
        self._metrics["train" if self.model.training else "eval"]["sequences/padding_frac"].append(
            1 - tokens / forwarded
        )
        forward = partial(super()._get_per_token_logps_and_entropies, model, **kwargs)
        if self.args.recompute_forwards and torch.is_grad_enabled():
            # A repeated forward must not tell DDP that another backward is about to begin.
            contexts = partial(recompute_contexts, self.accelerator, model)
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        logps, entropies, aux_loss = forward_by_length(
            forward, input_ids, attention_mask, logits_to_keep, batches, self._tokenizer.pad_token_id
        )
        self._policy_logps = logps
        return logps, entropies, aux_loss  # (B, C), (B, C), ()

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        logps, self._policy_logps = self._policy_logps, None
        if self.beta != 0.0 and self.loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            log_ratio = None
            if self.args.use_bias_correction_kl:
                log_ratio = logps - inputs.get("old_per_token_logps", logps.detach())  # (B, C)
                if self.importance_sampling_level == "sequence":
                    log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
            kl = kl_per_sequence(
                logps, inputs["ref_per_token_logps"], mask, self.loss_type, self.max_completion_length, log_ratio
            )  # (B,)
            # The parent has counted the KL of each sequence with weight 1.
            normalizer = self.current_gradient_accumulation_steps if self.model.training else 1.0
            loss = loss + self.beta * ((inputs["loss_weights"] - 1) * kl).mean() / normalizer
        return loss

    # What the run tells about itself.

    def _log_rollouts(self, mode: str, num_sequences: int) -> None:
        metrics, device = self._metrics[mode], self.accelerator.device
        statistics = rollout_statistics(self._rollouts)
        statistics["sequences/per_rollout"] = (num_sequences, len(self._rollouts))
        statistics["tool/shared_frac"] = (self._searches.shared, self._searches.searches)
        hits = sum(cache.counters["hits"] for cache in self._caches)
        queries = hits + sum(cache.counters["misses"] for cache in self._caches)
        statistics["tool/cache_hit_frac"] = (hits - self._cache_counts[0], queries - self._cache_counts[1])
        self._cache_counts = (hits, queries)
        failure = last_tool_failure(self._rollouts)
        of_processes, failures = zip(*gather_object([(statistics, failure)]), strict=True)
        sums = {
            name: tuple(torch.tensor([part[name] for part in of_processes], dtype=torch.float64).sum(0).tolist())
            for name in statistics
        }
        for name, (total, count) in sums.items():
            metrics[name].append(total / count if count else torch.nan)

        # TRL's own names, per rollout instead of per row.
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in self._rollouts], device=device)
        truncated = torch.tensor([rollout.outcome == "truncated" for rollout in self._rollouts], device=device)
        seen = torch.tensor([sum(total_tokens(rollout) for rollout in self._rollouts)], device=device)
        lengths, truncated, seen = (self.accelerator.gather(tensor) for tensor in (lengths, truncated, seen))
        if mode == "train":
            self.state.num_input_tokens_seen += seen.sum().item()
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, value in length_metrics(lengths, truncated).items():
            metrics[name].append(value)

        errors, calls = sums["tool/error_frac"]
        if calls and errors / calls > self.args.max_tool_error_rate:
            raise RuntimeError(
                f"{errors:.0f} of {calls:.0f} tool calls failed for good, which is above `max_tool_error_rate` = "
                f"{self.args.max_tool_error_rate}. One of the last was {next(filter(None, failures))}. Repair the tool "
                f"and {self._save_before_stop()}, or raise `max_tool_error_rate`."
            )

    def _write_rollouts(self) -> None:
        if not self.args.log_rollouts:
            return
        mode = "train" if self.model.training else "eval"
        step = self.state.global_step
        records = [
            rollout_record(
                rollout,
                tokenizer=self._tokenizer,
                ids=self.args.log_rollout_ids,
                **{name: row[name] for name in ("id", "dataset") if name in row},
                step=step,
                mode=mode,
                # NaN, the reward that a function could not give, is no JSON.
                rewards={name: None if math.isnan(value) else value for name, value in rewards.items()},
                memory_weight=self.args.memory_advantage_weight,
            )
            for row, rollout, rewards in zip(self._rows, self._rollouts, self._rewards, strict=True)
        ]
        failed = not self._rollout_writer.write(records, mode, step)
        self._metrics[mode]["rollout/dump_failed_frac"].append(float(self._reduce_max([failed])[0]))

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            complete_model_card(
                f"{self.args.output_dir}/README.md",
                self.args,
                self.state.log_history,
                model_id=self.hub_model_id or self.args.output_dir,
                base_model=get_config_model_id(self.model.config),
                is_adapter=isinstance(self.model, PeftModel),
                system_prompt=self.protocol.system_prompt,
            )
