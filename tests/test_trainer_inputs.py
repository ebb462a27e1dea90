"""Wrong input to the trainer: refused when it is built, by name and with the remedy."""

import pytest
from conftest import config, dataset, search
from transformers import AutoTokenizer

from mempo_trl import MemPOTrainer


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (
            dict(train_dataset=dataset().rename_column("question", "q")),
            ["`train_dataset`", "'question'", "load_questions"],
        ),
        (dict(train_dataset=dataset().remove_columns("golden_answers")), ["`train_dataset`", "'golden_answers'"]),
        (dict(train_dataset=dataset(2, image=["a", "b"])), ["`train_dataset`", "image", "Remove"]),
        (
            dict(train_dataset=dataset(1).map(lambda row: {"golden_answers": []})),
            ["Row 0", "[]", "at least one answer"],
        ),
        (dict(train_dataset=dataset(1).map(lambda row: {"question": " "})), ["Row 0", "' '"]),
        (dict(eval_dataset={"dev": dataset().rename_column("question", "q")}), ["eval_dataset['dev']", "'question'"]),
        (dict(tools=[]), ["`tools`", "SearchTool"]),
        (dict(tools=[search, search]), ["same name", "search", "Rename"]),
        (dict(rollout_func=print), ["`rollout_func`", "`tools`"]),
        (dict(environment_factory=dict), ["`environment_factory`", "`tools`"]),
        (dict(processing_class="processor"), ["`processing_class`", "`str`", "tokenizer"]),
        (dict(args=dict(chat_template_path="no.jinja")), ["`chat_template_path`", "'no.jinja'", "chatml"]),
        (dict(args=dict(max_completion_length=8192)), ["`max_completion_length` is 8192", "lower it"]),
        (dict(args=dict(reward_weights=[1.0, 2.0])), ["2 numbers for 1 reward"]),
        (dict(train_dataset=None), ["`train_dataset`"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_input_is_refused_at_construction(wrong, parts, short_folder, tmp_path):
    """A `ValueError` before anything is trained, with the name, the value, and what to do."""
    given = dict(train_dataset=dataset(), tools=[search]) | wrong
    given["args"] = config(tmp_path, **given.get("args", {}))
    with pytest.raises(ValueError) as error:
        MemPOTrainer(short_folder, **given)
    for part in parts:
        assert part in str(error.value)


def test_templates_that_lose_text_are_refused(short_folder, tmp_path):
    """A tokenizer without template, and one that drops earlier thinking, fail when the trainer is built."""
    for template, parts in (
        (None, ["no chat template", "`chat_template_path`", "chatml"]),
        ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", ["<think>", "chatml"]),
    ):
        tokenizer = AutoTokenizer.from_pretrained(short_folder)
        tokenizer.chat_template = template
        with pytest.raises(ValueError) as error:
            MemPOTrainer(
                short_folder,
                args=config(tmp_path),
                train_dataset=dataset(),
                tools=[search],
                processing_class=tokenizer,
            )
        assert all(part in str(error.value) for part in parts)


def test_another_config_class_is_refused(short_folder, tmp_path):
    """`args` of another class would lack the fields: a `TypeError` says which class is needed."""
    with pytest.raises(TypeError, match="`MemPOConfig`, got `dict`"):
        MemPOTrainer(short_folder, args={}, train_dataset=dataset(), tools=[search])
