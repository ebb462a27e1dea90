"""Configuration of [`MemPOTrainer`]."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from .validation import check_options, check_values, choose


ANSWER_TEMPLATE = (
    "\n<think>\nI have sufficient information to provide the final answers.\n</think>\n<answer>\n{answer}\n</answer>"
)
"""The continuation whose answer tokens are scored, as in the published code."""

TOKEN_FILTERS = ("independent", "joint", "history", "none")

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

ALARM_THRESHOLDS = {
    "not_finite": 1,
    "memory_undefined": 0.5,
    "memory_filtered": 0.1,
    "kept_gap": 0.5,
    "format": 0.25,
    "memory_length": 0.4,
    "think_length": 0.4,
    "entropy": 3.0,
    "zero_spread": 0.9,
    "truncated": 0.25,
    "tool_errors": 0.1,
    "empty_results": 0.5,
    "sampling_gap": 0.1,
}
"""The alarms of a run ([`~mempo_trl.alarms.find_alarms`]) with their thresholds; docs/alarms.md gives the reasons."""


@dataclass
class MemPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`MemPOTrainer`].

    It adds to [`~trl.GRPOConfig`] what MemPO (https://huggingface.co/papers/2603.00680) needs; see there for all other
    parameters.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `num_generations`: Defaults to `16` instead of `8`.
    > - `gradient_accumulation_steps`: Defaults to `2` instead of `1`, so that a group of 16 fills a generation batch.
    > - `loss_type`: Defaults to `"grpo"` instead of `"dapo"`: one weight per rollout, shared by its tokens.
    > - `beta`: Defaults to `0.001` instead of `0.0`: KL against the reference.
    > - `learning_rate` is `1e-6` in both. `max_completion_length` limits one turn, not the rollout.
    >
    > The memory reward differs from the published one by default, as docs/results.md found better: the paper is
    > `memory_advantage_weight=1.0`, `memory_token_filter="independent"`, `memory_baseline="history"`,
    > `memory_answer="joint"` (recipes/Qwen2.5-7B-Instruct/mempo/config_paper.yaml).

    Args:
        > Parameters that control the rollout

        context (`str`, *optional*, defaults to `"memory"`):
            What a turn sees: `"memory"`, the question and the last turn with its tool response (MemPO), or `"full"`,
            all turns (ReAct-style, the baseline).
        max_turns (`int`, *optional*, defaults to `16`):
            Turns after which a rollout without an answer ends.
        system_prompt (`str`, *optional*):
            System prompt instead of the default one: a text, or the path of a text file. `{tools}` in it stands for
            the JSON schemas of the tools, which the chat template then does not state again.
        chat_template_path (`str`, *optional*):
            Chat template instead of the tokenizer's own: a Jinja file, or `"chatml"`. It is saved with the model.
        max_tool_response_length (`int`, *optional*):
            Tokens after which a tool response is cut. `None` keeps it whole.
        max_prompt_length (`int`, *optional*):
            Tokens above which the next prompt does not fit and a rollout ends as `"out_of_context"`. `None` takes the
            model's `max_position_embeddings` minus `max_completion_length`.
        tool_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which one attempt of a tool call is given up.
        tool_retries (`int`, *optional*, defaults to `2`):
            Further attempts after a failed one, with exponential back-off.
        max_tool_error_rate (`float`, *optional*, defaults to `0.5`):
            Fraction of finally failed tool calls in a generation batch above which training stops with an error. `1.0`
            never stops.
        tool_failure (`str`, *optional*, defaults to `"respond"`):
            What a tool call that failed for good means for its rollout: `"respond"`, the model is told that the call
            could not be made and goes on; `"exclude"`, the rollout also has no reward, no part in the baselines of its
            group, and no trained token.
        vllm_server_urls (`list[str]`, *optional*):
            Base URLs of several vLLM servers, instead of `vllm_server_base_url`, for training an adapter with
            `use_vllm` and `vllm_mode="server"`. Each serves the base model; a rollout stays on one of them.

        > Parameters that control the memory reward

        memory_advantage_weight (`float`, *optional*, defaults to `0.3`):
            λ, the weight of the memory advantage on memory tokens. With `0.0` nothing is scored: GRPO over rewritten
            contexts.
        memory_prob_threshold (`float`, *optional*, defaults to `0.5`):
            τ, the probability above which an answer token counts as confident.
        memory_token_filter (`str`, *optional*, defaults to `"none"`):
            Which answer tokens count: `"independent"`, each side's own confident ones (published); `"joint"`, those
            confident on both sides; `"history"`, those that the baseline context makes confident; `"none"`, all.
        memory_baseline (`str`, *optional*, defaults to `"previous"`):
            What the memory is compared with: `"history"`, the full history before the turn (the paper), or
            `"previous"`, the memory of the turn before.
        memory_answer (`str`, *optional*, defaults to `"objectives"`):
            `"joint"`: one mean over all answer tokens (the paper). `"objectives"`: the probability of each objective,
            averaged.
        answer_template (`str`, *optional*):
            Continuation whose answer is scored, with one `{answer}`. Defaults to that of the published code.
        memory_scoring (`str`, *optional*, defaults to `"auto"`):
            How contexts are scored: `"comb"`, in one pass over the unique tokens of a rollout; `"rows"`, each context
            as a row of its own; `"auto"`, the comb where the model can be scored with it (a cache that can be cropped:
            no sliding-window, hybrid or recurrent layers).
        memory_scoring_max_tokens (`int`, *optional*, defaults to `16384`):
            Tokens per forward pass of the memory scoring.

        > Parameters that control the training

        max_tokens_per_microbatch (`int`, *optional*, defaults to `16384`):
            Tokens per forward pass of the loss, the old policy and the reference. Sequences of like length share one,
            padding included; the loss and its gradients are those of the whole micro-batch.
        recompute_forwards (`bool`, *optional*, defaults to `False`):
            Whether the backward pass repeats each of these forwards instead of keeping what they computed. The memory of
            a micro-batch is then that of one forward, whatever the number of turns, for the time of another forward.

        > Parameters that control the logging

        log_rollouts (`bool`, *optional*, defaults to `True`):
            Whether to write every rollout as a JSON line under `output_dir/rollouts`.
        log_rollout_ids (`bool`, *optional*, defaults to `False`):
            Whether these lines hold token ids and log-probabilities as well.

        > Parameters that control the alarms

        alarms (`bool`, *optional*, defaults to `True`):
            Whether a line in the log says when a metric shows that the run goes wrong (docs/alarms.md).
        alarm_thresholds (`dict[str, float]`, *optional*):
            Thresholds by name of the alarm, instead of the default ones; `None` switches that alarm off. All names and
            values are in `ALARM_THRESHOLDS`.
        stop_on_alarms (`list[str]`, *optional*):
            Alarms that end training with a checkpoint, or `["all"]`.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "alarm_thresholds"]

    # Parameters whose default values are overridden from GRPOConfig
    num_generations: int | None = field(
        default=16,
        metadata={"help": "Number of rollouts per question. The generation batch must be divisible by this value."},
    )
    gradient_accumulation_steps: int = field(
        default=2,
        metadata={"help": "Number of micro-batches per optimiser step."},
    )
    loss_type: str = field(
        default="grpo",
        metadata={"help": "Loss type of GRPOConfig. With 'grpo' each rollout has one weight, shared by its tokens."},
    )
    beta: float = field(
        default=0.001,
        metadata={"help": "KL coefficient against the reference. With 0.0, the reference is not loaded."},
    )

    # Parameters that control the rollout
    context: str = field(
        default="memory",
        metadata={
            "help": "What a turn sees: 'memory' (question and last turn, MemPO) or 'full' (all turns).",
            "choices": ["memory", "full"],
        },
    )
    max_turns: int = field(default=16, metadata={"help": "Turns after which a rollout without an answer ends."})
    system_prompt: str | None = field(
        default=None,
        metadata={
            "help": "System prompt: a text or the path of a text file; '{tools}' stands for the tools' schemas."
        },
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "Chat template instead of the tokenizer's own: a Jinja file, or 'chatml'."},
    )
    max_tool_response_length: int | None = field(
        default=None, metadata={"help": "Tokens after which a tool response is cut. None keeps it whole."}
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens above which the next prompt does not fit and the rollout ends. None takes the model's "
            "max_position_embeddings minus max_completion_length."
        },
    )
    tool_timeout: float = field(
        default=60.0, metadata={"help": "Seconds after which one attempt of a tool call is given up."}
    )
    tool_retries: int = field(default=2, metadata={"help": "Further attempts after a failed tool call."})
    max_tool_error_rate: float = field(
        default=0.5,
        metadata={
            "help": "Fraction of finally failed tool calls in a generation batch above which training stops. 1.0 "
            "never stops."
        },
    )
    tool_failure: str = field(
        default="respond",
        metadata={
            "help": "What a tool call that failed for good means for its rollout: the model is told and goes on "
            "('respond'), or the rollout also takes no part in training ('exclude').",
            "choices": ["respond", "exclude"],
        },
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "Base URLs of several vLLM servers, instead of vllm_server_base_url, for training an adapter with "
            "vllm_mode 'server'."
        },
    )

    # Parameters that control the memory reward
    memory_advantage_weight: float = field(
        default=0.3, metadata={"help": "Weight of the memory advantage on memory tokens (lambda). 0.0 scores nothing."}
    )
    memory_prob_threshold: float = field(
        default=0.5, metadata={"help": "Probability above which an answer token counts as confident (tau)."}
    )
    memory_token_filter: str = field(
        default="none",
        metadata={
            "help": "Which answer tokens count: 'independent' (published), 'joint', 'history' or 'none'.",
            "choices": list(TOKEN_FILTERS),
        },
    )
    memory_baseline: str = field(
        default="previous",
        metadata={
            "help": "What a memory is compared with: the 'history' (the paper) or the 'previous' memory.",
            "choices": ["history", "previous"],
        },
    )
    memory_answer: str = field(
        default="objectives",
        metadata={
            "help": "Answer probability over all answer tokens ('joint', the paper) or averaged over 'objectives'.",
            "choices": ["joint", "objectives"],
        },
    )
    answer_template: str = field(
        default=ANSWER_TEMPLATE, metadata={"help": "Continuation whose answer is scored, with one '{answer}'."}
    )
    memory_scoring: str = field(
        default="auto",
        metadata={
            "help": "How contexts are scored: in one pass over the unique tokens of a rollout ('comb'), each as a row "
            "of its own ('rows'), or 'auto': the comb where the model can be scored with it.",
            "choices": ["auto", "comb", "rows"],
        },
    )
    memory_scoring_max_tokens: int = field(
        default=16384, metadata={"help": "Tokens per forward pass of the memory scoring."}
    )

    # Parameters that control the training
    max_tokens_per_microbatch: int = field(
        default=16384,
        metadata={"help": "Tokens per forward pass of the loss, the old policy and the reference."},
    )
    recompute_forwards: bool = field(
        default=False,
        metadata={
            "help": "Whether the backward pass repeats each forward instead of keeping what it computed: the memory of "
            "one forward, whatever the number of turns, for the time of another forward."
        },
    )

    # Parameters that control the logging
    log_rollouts: bool = field(
        default=True, metadata={"help": "Whether to write every rollout as a JSON line under output_dir/rollouts."}
    )
    log_rollout_ids: bool = field(
        default=False, metadata={"help": "Whether these lines hold token ids and log-probabilities as well."}
    )

    # Parameters that control the alarms
    alarms: bool = field(
        default=True,
        metadata={"help": "Whether a line in the log says when a metric shows that the run goes wrong."},
    )
    alarm_thresholds: dict[str, float | None] | str | None = field(
        default=None,
        metadata={
            "help": f"Thresholds of alarms instead of {ALARM_THRESHOLDS}, as JSON such as "
            '\'{"truncated": 0.5, "entropy": null}\'; null switches an alarm off.'
        },
    )
    stop_on_alarms: list[str] | None = field(
        default=None, metadata={"help": "Alarms that end training with a checkpoint, or 'all'."}
    )

    def __getstate__(self):
        # transformers pickles the arguments into every checkpoint, which may be pushed or shared.
        return {**self.__dict__, "hub_token": None}

    def __repr__(self):
        return str(self)  # without the tokens, which a dataclass would show

    def __post_init__(self):
        check_values(self)  # before the parent compares a text with a number, or divides by zero
        super().__post_init__()
        choose("context", self.context, ("memory", "full"))
        choose("loss_type", self.loss_type, LOSS_TYPES)
        choose("tool_failure", self.tool_failure, ("respond", "exclude"))
        choose("memory_token_filter", self.memory_token_filter, TOKEN_FILTERS)
        choose("memory_baseline", self.memory_baseline, ("history", "previous"))
        choose("memory_answer", self.memory_answer, ("joint", "objectives"))
        choose("memory_scoring", self.memory_scoring, ("auto", "comb", "rows"))
        check_options(self)
        if self.max_completion_length is None:
            raise ValueError("`max_completion_length` is None; a turn needs a limit, such as 512 tokens.")
        for name in ("tool_timeout", "memory_advantage_weight"):
            if math.isinf(self.__dict__[name]):
                raise ValueError(f"`{name}` is {self.__dict__[name]}; it must be finite.")
        if self.memory_advantage_weight < 0:
            raise ValueError(
                f"`memory_advantage_weight` is {self.memory_advantage_weight}; a negative weight would reward bad "
                "memories. Use 0.0 to switch the memory reward off."
            )
        for name in ("system_prompt", "chat_template_path", "answer_template"):
            value = self.__dict__[name]
            if not isinstance(value, str) and not (value is None and name != "answer_template"):
                raise ValueError(f"`{name}` is {value!r}; it must be a text.")
        if self.answer_template.count("{answer}") != 1:
            raise ValueError(
                f"`answer_template` is {self.answer_template!r}; it must contain '{{answer}}' exactly once."
            )
        if self.max_tool_calling_iterations is not None:
            raise ValueError(
                f"`max_tool_calling_iterations` is {self.max_tool_calling_iterations}, which belongs to TRL's own tool "
                "loop; set `max_turns` instead."
            )
        # TRL's trainer looks at this where it builds its own client.
        if self.loss_type == "vespo" and self.use_vllm and self.vllm_importance_sampling_correction:
            choose(
                "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, ("token_truncate", "token_mask")
            )
        if self.vllm_server_urls is not None:
            if not self.use_vllm or self.vllm_mode != "server":
                raise ValueError(
                    f"`vllm_server_urls` is {self.vllm_server_urls}, but `use_vllm` is {self.use_vllm} and `vllm_mode` "
                    f"is {self.vllm_mode!r}; set `use_vllm=True` and `vllm_mode='server'`."
                )
            if not self.vllm_server_urls or self.vllm_server_base_url is not None:
                raise ValueError(
                    f"`vllm_server_urls` is {self.vllm_server_urls} and `vllm_server_base_url` is "
                    f"{self.vllm_server_base_url!r}; give the servers in one of them."
                )
        if not isinstance(self.alarm_thresholds, dict | None):
            raise ValueError(
                f"`alarm_thresholds` is {self.alarm_thresholds!r}; give a JSON object such as "
                '{"truncated": 0.5, "entropy": null}.'
            )
        for name, threshold in (self.alarm_thresholds or {}).items():
            choose("alarm_thresholds", name, tuple(ALARM_THRESHOLDS))
            is_nan = threshold != threshold
            if isinstance(threshold, bool) or not isinstance(threshold, int | float | None) or is_nan:
                raise ValueError(
                    f"`alarm_thresholds[{name!r}]` is {threshold!r}; it must be a number, or `None` to switch the "
                    "alarm off."
                )
        self.alarm_thresholds = {**ALARM_THRESHOLDS, **(self.alarm_thresholds or {})}
        if not isinstance(self.stop_on_alarms, list | None):
            raise ValueError(f"`stop_on_alarms` is {self.stop_on_alarms!r}; give a list, such as ['all'].")
        for name in self.stop_on_alarms or []:
            choose("stop_on_alarms", name, ("all", *ALARM_THRESHOLDS))
