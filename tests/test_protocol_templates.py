"""Pitfall 5: a chat template keeps what the model wrote, byte for byte, or is refused when the protocol is built."""

import contextlib

import jinja2
import pytest
from conftest import TRL_CHAT_TEMPLATES
from test_protocol import PLAIN, TOOLBOX, TURN, prompt_of_ids, trl_template, with_template

from mempo_trl.protocol import Protocol, load_chat_template


@pytest.mark.parametrize("template", sorted(path.stem for path in TRL_CHAT_TEMPLATES.glob("*.jinja")))
def test_every_template_of_trl(qwen_tokenizer, template, monkeypatch):
    """A template either gives prompts of ids that equal those rendered from messages, or a `ValueError` says why not."""
    monkeypatch.setattr(qwen_tokenizer, "chat_template", trl_template(template))
    try:
        protocol = Protocol(qwen_tokenizer, TOOLBOX)
    except ValueError as error:
        assert "`chat_template_path`" in str(error)  # the remedy
        return
    ours = prompt_of_ids(protocol, "Who?", TURN, "A cat.")
    # The messages, with the response in either role and the tools in the template or not.
    rendered = []
    for tools, response in [
        (TOOLBOX.schemas, {"role": "tool", "name": "search", "content": "A cat."}),
        (None, {"role": "user", "content": "<tool_response>\nA cat.\n</tool_response>"}),
    ]:
        messages = [*protocol.messages("Who?"), {"role": "assistant", "content": TURN}, response]
        with contextlib.suppress(jinja2.TemplateError):  # some templates have no tool role
            rendered.append(
                qwen_tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            )
    assert ours in rendered
    assert TURN in ours
    assert ours.index("Who?") < ours.index(TURN) < ours.rindex("A cat.")


@pytest.mark.parametrize(
    "template",
    ["qwen2_5", "qwen2_5_training", "qwen3_instruct_2507", "qwen3_vl", "llama3_1", "llama3_2", "gemma", "phi3"],
)
def test_good_templates(qwen_tokenizer, template, monkeypatch):
    """Templates that keep the text are accepted, with or without tools and a system role."""
    monkeypatch.setattr(qwen_tokenizer, "chat_template", trl_template(template))
    protocol = Protocol(qwen_tokenizer, TOOLBOX)
    assert TURN in prompt_of_ids(protocol, "Who?", TURN, "A cat.")


def test_shipped_template(qwen_tokenizer, monkeypatch):
    """The shipped ChatML keeps the text, too, and says the same as Qwen2.5's, word for word."""
    shown = []
    for template in (load_chat_template("chatml"), trl_template("qwen2_5")):
        monkeypatch.setattr(qwen_tokenizer, "chat_template", template)
        shown.append(prompt_of_ids(Protocol(qwen_tokenizer, TOOLBOX), "Who?", TURN, "A cat."))
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "template", ["qwen3", "qwen3_training", "qwen3_5_think", "qwen3_6", "deepseekv3", "glm4moe", "nemotron_3_nano"]
)
def test_templates_that_lose_the_memory(qwen_tokenizer, template, monkeypatch):
    """Templates that take the thinking apart lose or move the memory before it; the error names what is lost."""
    monkeypatch.setattr(qwen_tokenizer, "chat_template", trl_template(template))
    with pytest.raises(ValueError, match="(?s)does not keep '<mem>probe memory</mem>.*chat_template_path.*'chatml'"):
        Protocol(qwen_tokenizer, TOOLBOX)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("llava_next", "can't render text messages"),  # wants a list of parts: `UndefinedError` in the template
        ("idefics3", "loses or changes"),  # takes text for a list of parts and shows nothing of it
        ("smolvlm", "loses or changes"),
        ("llama3", "'bos_token' is undefined"),  # the tokenizer has no such token
        ("gptoss", "in another way once a turn follows"),
    ],
)
def test_templates_that_fail(qwen_tokenizer, template, says, monkeypatch):
    """A template that fails on text messages gives a readable error, not the one of its engine."""
    monkeypatch.setattr(qwen_tokenizer, "chat_template", trl_template(template))
    with pytest.raises(ValueError, match=says):
        Protocol(qwen_tokenizer, TOOLBOX)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"), None),  # nothing to trim in the probe
        (PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"), "does not keep '<mem>probe"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content.replace('think', 'thought') }}"), "does not keep '<think>"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"), "does not keep '<mem>probe"),
        # Thinking before memory: all parts are there, in another order.
        (
            PLAIN.replace(
                "{{ m.content }}",
                "{% set p = m.content.split('<think>') %}{{ '<think>' + p[1] + p[0] if p | length > 1 else m.content }}",
            ),
            "does not keep",
        ),
        # `loop.last` logic: the question is rendered in another way once a turn follows.
        (PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ ' /think' if loop.last }}"), "in another way"),
        # The line break after the end of a turn is missing when a tool message follows.
        (PLAIN.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{{ '\n' if loop.last }}{% endfor %}"), "in another way"),
        ("{{ raise_exception('no') }}", "can't render text messages with the roles .*: no"),
        ("{{ messages + 1 }}", "can't render text messages"),
        ("{{ 'constant' }}", "does not keep"),
    ],
)
def test_check_of_the_template(template, says):
    """What a template does to the last turn is found when the protocol is built."""
    tokenizer = with_template(template)
    if says is None:
        Protocol(tokenizer, TOOLBOX)
    else:
        with pytest.raises(ValueError, match=says):
            Protocol(tokenizer, TOOLBOX)


def test_template_without_an_end_of_turn():
    """A template that writes nothing at all between messages still gives prompts that extend one another."""
    protocol = Protocol(
        with_template("{% for m in messages %}{{ m.content }}{% endfor %}"), TOOLBOX, system_prompt="S"
    )
    assert protocol.end_of_turn_id is None
    assert prompt_of_ids(protocol, "Who?", TURN, "A cat.") == (f"SWho?{TURN}<tool_response>\nA cat.\n</tool_response>")


def test_no_chat_template():
    """A tokenizer without a chat template is refused with the remedy."""
    with pytest.raises(ValueError, match="has no chat template. Set `chat_template_path`"):
        Protocol(with_template(None), TOOLBOX)
