"""Wrong values: each is refused when it is given, with its name, the value and the remedy, never hours later."""

import dataclasses
import functools

import pytest
from conftest import byte_tokenizer, config, dataset, search, tiny_model
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, T5Config, T5ForConditionalGeneration
from trl import GRPOConfig

from mempo_trl import MemPOConfig, MemPOTrainer, SearchTool
from mempo_trl.inputs import check_tokenizer
from mempo_trl.rewards import exact_match_reward, format_reward
from mempo_trl.tools import Toolbox
from mempo_trl.validation import CHOICES, FRACTIONS, GENERATION_KWARGS, WITHOUT_EFFECT, field_types


NAN, INFINITY = float("nan"), float("inf")
FIELDS = {field.name: field for field in dataclasses.fields(MemPOConfig)}
TYPES = field_types(MemPOConfig)
OWN = [name for name in FIELDS if name not in GRPOConfig.__dataclass_fields__]


def numbers(names) -> list[str]:
    return [name for name in names if {int, float} & TYPES[name] and str not in TYPES[name]]


# Fields that decide how rollouts, groups, losses and steps are made, and those of ours.
NUMBERS = numbers(
    [
        *OWN,
        *(
            "num_generations",
            "num_generations_eval",
            "max_completion_length",
            "steps_per_generation",
            "beta",
            "epsilon",
        ),
        *("num_iterations", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "delta", "learning_rate"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed", "max_grad_norm"),
        *("top_entropy_quantile", "entropy_coef", "off_policy_mask_threshold", "ref_model_sync_steps"),
    ]
)
SWITCHES = [name for name in (*OWN, "shuffle_dataset", "use_vllm", "bf16") if TYPES[name] <= {bool, type(None)}]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_numbers(name, tmp_path):
    """A text (as from a quoted value in YAML), a truth value, a list or NaN is refused for every number, by name."""
    for value, part in (("12", "without quotes"), (True, "a number"), ([3], "a number"), (NAN, "a number")):
        with pytest.raises(ValueError) as error:
            config(tmp_path, **{name: value})
        assert f"`{name}` is" in str(error.value) and str(value) in str(error.value) and part in str(error.value)
    if float not in TYPES[name]:
        with pytest.raises(ValueError, match=f"`{name}` is 2.5; it must be a whole number"):
            config(tmp_path, **{name: 2.5})


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_switches(name, tmp_path):
    """The text `"false"` would count as true."""
    with pytest.raises(ValueError, match=f"`{name}` is 'false'; it must be True or False"):
        config(tmp_path, **{name: "false"})


# Each was tried before there was a check: "late" failed after the first rollouts or at their start with a message that
# names no field, "silent" trained on (with NaN, with other values, or not at all).
WRONG_VALUES = [
    ("max_turns", 10**12, "at most 10000"),  # late: no memory for its slots
    ("max_turns", -1, "at least 1"),
    ("tool_timeout", INFINITY, "finite"),  # silent: a tool that hangs holds the run for ever
    ("tool_timeout", -0.0, "positive"),
    ("memory_advantage_weight", INFINITY, "at most 1e+06"),  # silent: NaN
    ("memory_advantage_weight", 1e300, "at most 1e+06"),  # silent: NaN
    ("memory_prob_threshold", -1, "between 0 and 1"),
    ("alarm_thresholds", {"entropy": NAN}, "must be a number"),  # silent: never an alarm
    ("alarm_thresholds", "entropy", "JSON object"),
    ("stop_on_alarms", "all", "['all']"),
    ("system_prompt", 3, "must be a text"),
    ("chat_template_path", 5, "must be a text"),
    ("answer_template", None, "must be a text"),
    ("context", None, "'memory', 'full'"),
    ("chat_template_kwargs", "x", "JSON object"),
    ("model_init_kwargs", "x", "JSON object"),
    ("generation_kwargs", "x", "JSON object"),
    ("num_generations", None, "must be a number"),
    ("num_generations", 0, "at least 1"),
    ("num_generations_eval", -1, "at least 1"),
    ("num_generations_eval", 0, "at least 1"),  # silent: that of the training
    ("max_completion_length", None, "512"),
    ("max_completion_length", -5, "at least 1"),
    ("pad_to_multiple_of", 0, "at least 1"),
    ("pad_to_multiple_of", "0", "at least 1"),
    ("pad_to_multiple_of", "x", "whole number"),
    ("steps_per_generation", 0, "at least 1"),
    ("generation_batch_size", 0, "at least 1"),
    ("per_device_train_batch_size", 0, "at least 1"),
    ("gradient_accumulation_steps", 0, "at least 1"),
    ("num_iterations", 0, "at least 1"),  # silent: ends after no step
    ("temperature", 0, "positive"),
    ("temperature", -1.0, "positive"),
    ("top_p", 0.0, "keeps no token"),  # silent: everything is kept
    ("top_p", 2.0, "between 0 and 1"),  # silent
    ("top_k", -1, "retrieval_top_k"),
    ("min_p", 2.0, "between 0 and 1"),
    ("repetition_penalty", 0.0, "positive"),
    ("beta", -1.0, "0 or more"),  # silent: drives the policy away from the reference
    ("epsilon", -1.0, "0 or more"),  # silent
    ("importance_sampling_level", "seq", "'token', 'sequence'"),
    ("scale_rewards", "groups", "'group', 'batch', 'none'"),
    ("multi_objective_aggregation", "sum", "'sum_then_normalize'"),
    ("vllm_importance_sampling_mode", "mask", "'sequence_mask'"),
    ("vllm_mode", "remote", "'server'"),
    ("reward_weights", 1.0, "a list"),
    ("reward_weights", ["1"], "without quotes"),
    ("reward_weights", [NAN], "must be a number"),  # silent: no advantage at all
    ("top_entropy_quantile", 2.0, "between 0 and 1"),  # silent: no effect
    ("top_entropy_quantile", -1.0, "between 0 and 1"),
    ("off_policy_mask_threshold", -1.0, "positive"),  # silent
    ("sapo_temperature_pos", 0.0, "positive"),
    ("label_smoothing_factor", 0.1, "no effect"),  # silent
    ("data_seed", 3, "`seed`"),  # silent
    ("train_sampling_strategy", "group_by_length", "no effect"),  # silent
    ("accelerator_config", {"dispatch_batches": True}, "leave it out"),
    ("accelerator_config", {"split_batches": True}, "leave it out"),
    ("max_steps", 0, "at least 1, or -1"),  # silent: whole epochs
    ("max_steps", -5, "at least 1, or -1"),
    ("learning_rate", "1e-6", "without quotes"),
    ("learning_rate", -1.0, "0 or more"),
    ("seed", -1, "between 0 and"),
    *(("generation_kwargs", {name: 5}, remedy) for name, remedy in GENERATION_KWARGS.items()),
    ("generation_kwargs", {"temperatur": 0.5}, "does not know"),  # silent
]


@pytest.mark.parametrize(("name", "value", "remedy"), WRONG_VALUES, ids=lambda value: str(value)[:30])
def test_wrong_values(name, value, remedy, tmp_path):
    """A `ValueError` of the configuration that names the field, quotes the value and says what to do."""
    with pytest.raises(ValueError) as error:
        config(tmp_path, **{name: value})
    given = next(iter(value)) if isinstance(value, dict | list) and value else value
    shown = {"label_smoothing_factor": "0.1", "accelerator_config": str(given)}.get(name, str(given))
    for part in (f"`{name}", shown.removesuffix(".0") if name == "seed" else shown, remedy):
        assert part in str(error.value), error.value


def test_num_train_epochs(tmp_path):
    """Without `max_steps` there have to be epochs."""
    with pytest.raises(ValueError, match="`num_train_epochs` is 0; it must be above 0"):
        config(tmp_path, max_steps=-1, num_train_epochs=0)


def test_a_reference_to_synchronise(tmp_path):
    """`sync_ref_model` without KL has nothing to synchronise, which TRL finds out only with the weights in memory."""
    with pytest.raises(ValueError, match="`sync_ref_model` is True but with `beta` = 0.0"):
        config(tmp_path, sync_ref_model=True, beta=0.0)


@pytest.mark.parametrize(
    "given",
    [
        *(dict(memory_advantage_weight=value) for value in (-0.0, 0, 1e6, 3)),
        dict(max_grad_norm=INFINITY),  # a known way to log the norm without clipping
        *(dict(pad_to_multiple_of=value) for value in ("auto", "none", "8", 8, None)),
        *(dict(scale_rewards=value) for value in (True, False, "batch")),
        dict(learning_rate=0),
        dict(vllm_importance_sampling_clip_max=None, vllm_importance_sampling_clip_min=0.1),
        dict(delta=None, epsilon_high=0.3, min_p=0.1, top_p=1),
        dict(max_steps=-1, num_train_epochs=0.5),
        dict(generation_kwargs={"suppress_tokens": [3]}, chat_template_kwargs='{"enable_thinking": false}'),
        dict(use_vllm=True, top_k=-1, generation_kwargs={"stop": ["</answer>"]}),
        dict(accelerator_config={"even_batches": False}),
        dict(generation_batch_size=4),
        dict(logging_steps=5, warmup_steps=0.1, save_steps=100),
    ],
    ids=str,
)
def test_right_values(given, tmp_path):
    """What works is not refused, in any of the forms in which it can be given, and beside a parser of the fields."""
    HfArgumentParser(MemPOConfig)  # takes the `None` out of the types of the fields
    config(tmp_path, **given)


def test_tables_name_fields():
    """Every name in the tables of checks is a field: a typo, or a field that TRL drops, would check nothing."""
    from mempo_trl import validation

    names = {*validation.AT_LEAST_ONE, *validation.POSITIVE, *validation.NOT_NEGATIVE, *FRACTIONS, *validation.LARGEST}
    assert {*names, *CHOICES, *WITHOUT_EFFECT} <= set(FIELDS)


# Tools


def positional(query: str, /) -> str:
    """
    Searches.

    Args:
        query: What to search for.
    """


def several(*queries: str) -> str:
    """
    Searches.

    Args:
        queries: What to search for.
    """


def anything(query: str, **more: str) -> str:
    """
    Searches.

    Args:
        query: What to search for.
        more: More.
    """


def untyped(query) -> str:
    """
    Searches.

    Args:
        query: What to search for.
    """


def undocumented(query: str) -> str:
    return query


def undescribed(query: str) -> str:
    """Searches."""


def unknown_type(query: "set[bytes]") -> str:
    """
    Searches.

    Args:
        query: What to search for.
    """


async def stream(query: str):
    """
    Searches.

    Args:
        query: What to search for.
    """
    yield query


class Tool:
    """A callable object, whose name is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, query: str) -> str:
        """
        Searches.

        Args:
            query: What to search for.
        """
        return query


@pytest.mark.parametrize(
    ("tools", "parts"),
    [
        (search, ["`tools`", "a list"]),
        ("search", ["`tools`", "'search'", "a list"]),
        (["search"], ["'search'", "can't be called"]),
        ([None], ["None", "can't be called"]),
        ([SearchTool], ["SearchTool", "is a class", "an object of it"]),
        ([lambda query: query], ["<lambda>", "name"]),
        ([functools.partial(search)], ["partial", "`name` attribute"]),
        ([Tool()], ["None", "`name` attribute"]),
        ([Tool(name="my tool")], ["'my tool'", "letters, digits"]),
        ([Tool(name='a"b')], ["letters, digits"]),
        ([Tool(name="search"), search], ["same name", "search", "Rename"]),
        ([several], ["'several'", "*queries", "Name each"]),
        ([anything], ["'anything'", "**more", "Name each"]),
        ([positional], ["'positional'", "query", "by name"]),
        ([untyped], ["'untyped'", "type hint", "query: str"]),
        ([undocumented], ["'undocumented'", "docstring"]),
        ([undescribed], ["'undescribed'", "query", "docstring"]),
        ([unknown_type], ["'unknown_type'", "set[bytes]"]),
        ([stream], ["'stream'", "generator"]),
        ([len], ["'len'"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_tools(tools, parts):
    """A tool that the model could never call is refused by name, with what it lacks."""
    with pytest.raises(ValueError) as error:
        Toolbox(tools)
    assert all(part in str(error.value) for part in parts), error.value


def test_right_tools():
    """Functions, methods, objects with a name, async tools and keyword-only parameters."""

    async def later(*, query: str, limit: int | None = None) -> str:
        """
        Searches.

        Args:
            query: What to search for.
            limit: At most so many.
        """

    assert list(Toolbox((search, Tool(name="look-up_2"), later)).tools) == ["search", "look-up_2", "later"]


# What the trainer is given


def stream_of(*rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def frozen(model):
    return model.requires_grad_(False)


ROW = {"question": "Who?", "golden_answers": ["Anna"]}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (dict(train_dataset=[ROW]), ["`train_dataset`", "`list`", "from_list"]),
        (dict(train_dataset=DatasetDict(train=dataset())), ["`DatasetDict`", "one split"]),
        (dict(train_dataset=dataset(0)), ["`train_dataset` has 0 rows", "1 questions"]),
        (
            dict(train_dataset=dataset(3), args=dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)),
            ["3 rows", "takes 4 questions", "`generation_batch_size` 8 / `num_generations` 2"],  # silent: 0 steps
        ),
        (dict(eval_dataset=dataset(0)), ["`eval_dataset` has 0 rows"]),
        (
            dict(eval_dataset=dataset(), args=dict(num_generations_eval=3)),
            ["`per_device_eval_batch_size` 8 on 1 processes is no multiple of the 3"],  # late
        ),
        (dict(train_dataset=stream_of()), ["no column 'question'"]),
        (dict(train_dataset=stream_of({"question": 3, "golden_answers": ["a"]})), ["Row 0", "3", "a text"]),
        (dict(train_dataset=dataset(question=["a", None, "b", "c"])), ["Row 1", "None"]),
        (dict(train_dataset=dataset(golden_answers=['["cat"]'] * 4)), ["Row 0", '["cat"]', "json.loads"]),  # silent
        (dict(train_dataset=dataset(golden_answers=["['cat', 'dog']"] * 4)), ["literal_eval"]),  # silent
        (dict(train_dataset=dataset(golden_answers=[[None]] * 4)), ["Row 0", "at least one answer"]),
        (dict(train_dataset=dataset(prompts=["x"] * 4)), ["'prompts'", "Rename or remove"]),  # late
        (dict(train_dataset=dataset(rollouts=["x"] * 4)), ["'rollouts'", "Rename or remove"]),  # silent
        (
            dict(train_dataset=dataset(question=["a" * 9000] * 4)),
            ["row 0 of `train_dataset`", "tokens", "Drop the row"],
        ),
        (dict(reward_funcs="exact_match_reward"), ["'exact_match_reward'", "mempo_trl.rewards.exact_match_reward"]),
        (dict(reward_funcs=[3]), ["`reward_funcs` has 3"]),
        (dict(reward_funcs=[]), ["`reward_funcs` is empty"]),
        (dict(reward_funcs=lambda completions: [0.0]), ["unexpected keyword argument", "`**kwargs`"]),  # late
        (dict(reward_funcs=[lambda needed, **kwargs: [0.0]]), ["'needed'"]),  # late
        (dict(model=None), ["`model`", "`NoneType`"]),
        (dict(peft_config={"r": 2}), ["`peft_config`", "`dict`", "LoraConfig"]),
        (
            dict(peft_config=LoraConfig(target_modules=["q_proj"], inference_mode=True)),
            ["`peft_config.inference_mode` is True"],  # silent: trains nothing
        ),
        (dict(peft_config=LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")), ["'SEQ_CLS'", "'CAUSAL_LM'"]),
        (dict(peft_config=LoraConfig(target_modules=["c_attn"])), ["c_attn", "not found"]),
        (dict(peft_config=PromptTuningConfig(num_virtual_tokens=2)), ["`PromptTuningConfig`", "LoraConfig"]),
        (dict(peft_config=PrefixTuningConfig(num_virtual_tokens=2)), ["`PrefixTuningConfig`", "LoraConfig"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else None,
)
def test_wrong_arguments_of_the_trainer(given, parts, short_folder, tmp_path):
    """Each is refused by the constructor, with its name, what is wrong and what to do."""
    given = dict(model=short_folder, train_dataset=dataset(), tools=[search]) | given
    given["args"] = config(tmp_path, **given.get("args", {}))
    with pytest.raises((ValueError, TypeError)) as error:
        MemPOTrainer(**given)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.fixture(scope="module")
def adapter(short_folder, tmp_path_factory) -> str:
    """A LoRA adapter in a folder."""
    folder = str(tmp_path_factory.mktemp("adapter"))
    model = AutoModelForCausalLM.from_pretrained(short_folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "args", "parts"),
    [
        # TRL makes a trainable copy for the reference, so that a training without a trained weight went on silently.
        (lambda base, path: PeftModel.from_pretrained(base, path), {}, ["trainable", "`is_trainable=True`"]),
        (lambda base, path: frozen(base), {}, ["trainable", "requires_grad_"]),
        (
            lambda base, path: PeftModel.from_pretrained(base, path, is_trainable=True, adapter_name="mine"),
            {},
            ["'mine'", "'default'", "`adapter_name`"],
        ),
        (
            lambda base, path: T5ForConditionalGeneration(
                T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=300)
            ),
            dict(beta=0.0),
            ["T5ForConditionalGeneration", "encoder-decoder"],
        ),
        (lambda base, path: tiny_model(byte_tokenizer()), {}, ["`beta`", "came from nowhere"]),
    ],
    ids=["frozen adapter", "frozen model", "another name", "encoder-decoder", "no reference"],
)
def test_wrong_models(make, args, parts, short_folder, short_tokenizer, adapter, tmp_path):
    """A model that nothing can be trained in, or not with this method, is refused with the reason."""
    model = make(AutoModelForCausalLM.from_pretrained(short_folder), adapter)
    with pytest.raises(ValueError) as error:
        MemPOTrainer(
            model,
            args=config(tmp_path, **args),
            train_dataset=dataset(),
            tools=[search],
            processing_class=short_tokenizer,
        )
    assert all(part in str(error.value) for part in parts), error.value


def test_two_adapters_are_not_confused(short_folder, short_tokenizer, adapter, tmp_path):
    """An adapter with a `peft_config` for another: the message says how to have either."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(short_folder), adapter, is_trainable=True)
    with pytest.raises(ValueError, match="Leave `peft_config` out to train the adapter further, or merge it first"):
        MemPOTrainer(
            model,
            args=config(tmp_path),
            train_dataset=dataset(),
            tools=[search],
            processing_class=short_tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj"]),
        )


def test_tokenizers(short_folder):
    """One without an eos token, and one with more ids than the model embeds, which a GPU would answer with an assert."""
    tokenizer, model = AutoTokenizer.from_pretrained(short_folder), AutoModelForCausalLM.from_pretrained(short_folder)
    check_tokenizer(tokenizer, model)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="ids up to 267, but the model embeds 267: it belongs to another model"):
        check_tokenizer(tokenizer, model)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos token, so that no turn could end. Set `tokenizer.eos_token`"):
        check_tokenizer(tokenizer)


@pytest.mark.parametrize("name", ["chat_template_path", "system_prompt"])
def test_files_that_are_no_text(name, short_folder, tmp_path):
    """A binary file as template or system prompt is named."""
    path = tmp_path / "file.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"`{name}` is .*file.txt.*UTF-8"):
        MemPOTrainer(short_folder, args=config(tmp_path, **{name: str(path)}), train_dataset=dataset(), tools=[search])


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content", "{{ messages[0].content.no() }}", ""])
def test_broken_templates(template, short_folder, tmp_path):
    """Jinja that does not parse, that fails, and that is empty: the template is named, and one that works."""
    path = tmp_path / "broken.jinja"
    path.write_text(template)
    with pytest.raises(ValueError, match="chat template of .*`chat_template_path` to a template.*'chatml'"):
        MemPOTrainer(
            short_folder, args=config(tmp_path, chat_template_path=str(path)), train_dataset=dataset(), tools=[search]
        )


def test_reward_functions_that_fit(short_folder, tmp_path):
    """Functions with `**kwargs`, those that name everything, and callable objects are accepted."""

    def all_named(
        prompts,
        completions,
        completion_ids,
        rollouts,
        question,
        golden_answers,
        trainer_state,
        log_extra,
        log_metric,
    ):
        return [0.0] * len(prompts)

    MemPOTrainer(
        short_folder,
        reward_funcs=[exact_match_reward, format_reward, all_named],
        args=config(tmp_path, reward_weights=[1.0, 1, 0.5]),
        train_dataset=Dataset.from_list([ROW] * 4),
        tools=[search],
    )
