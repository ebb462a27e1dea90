"""Teachers behind a chat endpoint: what they see, and what becomes of what they say."""

import asyncio

import pytest
from conftest import EOS, byte_tokenizer, call, search
from stub_teacher import Reply, StubServer, chat

from mempo_trl.endpoints import ChatGenerator
from mempo_trl.generation import GenerationError, run_in_event_loop
from mempo_trl.protocol import Protocol
from mempo_trl.rollout import play
from mempo_trl.tools import Toolbox


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    """A key that a test may name, and none of the user."""
    monkeypatch.setenv("STUB_KEY", "secret-key")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def protocol(context: str = "memory", **kwargs) -> Protocol:
    return Protocol(byte_tokenizer(), Toolbox([search], retries=0), context, system_prompt="Search.", **kwargs)


SCRIPT = [
    "<think>First.</think>" + call("Anna") + "\nDoc 1(Title: invented)",
    "<mem>Anna: cat?</mem><think>Sure?</think>" + call("cat"),
    "<mem>cat</mem><think>Done.</think><answer>cat</answer>",
]


def teach(protocol: Protocol, replies: list[Reply], **kwargs):
    """Play a rollout with the stub as its teacher; the rollout, the requests and the tokens counted."""
    given = iter(replies)
    with StubServer(lambda request: next(given)) as server:
        generator = ChatGenerator(server.url, "teacher", protocol=protocol, **kwargs)

        async def one():
            rollout = await play(
                "What pet?",
                [["cat"]],
                protocol=protocol,
                generator=generator,
                call_tool=protocol.toolbox.call,
                max_turns=5,
            )
            return rollout, generator.usage()

        ((rollout, usage),) = run_in_event_loop(asyncio.wait_for(generator.run([one()]), timeout=60))
    return rollout, server.requests, usage


@pytest.mark.parametrize("context", ["memory", "full"])
def test_a_teacher_sees_what_the_student_sees(context):
    """
    The teacher gets the question and the last turn with its response, or everything with the full context; a turn only
    up to its action; and the tools, which the student's template states.
    """
    student = protocol(context, max_tool_response_length=20)
    rollout, requests, usage = teach(student, [chat(text) for text in SCRIPT])
    assert rollout.outcome == "answer" and rollout.answer == "cat"
    assert usage == {"prompt_tokens": 30, "completion_tokens": 15}
    assert [request.path for request in requests] == ["/v1/chat/completions"] * 3
    system, question = requests[0].body["messages"]
    assert system["role"] == "system" and system["content"].startswith("Search.\n\nThese are the tools")
    assert '"name": "search"' in system["content"]
    assert question == {"role": "user", "content": "What pet?"}
    turns = [
        [
            {"role": "assistant", "content": SCRIPT[0].split("\nDoc")[0]},
            {"role": "user", "content": "<tool_response>\nDoc 1(Title: Anna) A\n</tool_response>"},
        ],
        [
            {"role": "assistant", "content": SCRIPT[1]},
            {"role": "user", "content": "<tool_response>\nDoc 1(Title: cat) ca\n</tool_response>"},
        ],
    ]
    assert requests[1].body["messages"] == [system, question, *turns[0]]
    assert requests[2].body["messages"] == [system, question, *(turns[0] if context == "full" else []), *turns[1]]
    # The student's next prompt holds the same texts.
    prompt = student.tokenizer.decode(rollout.turns[2].prompt_ids)
    assert turns[1][0]["content"] in prompt and turns[1][1]["content"] in prompt


def test_a_system_prompt_that_has_the_tools():
    """A system prompt which places the tools is sent as it is."""
    student = Protocol(byte_tokenizer(), Toolbox([search]), system_prompt="Use {tools} now.")
    _, requests, _ = teach(student, [chat(SCRIPT[2])])
    assert requests[0].body["messages"][0] == {"role": "system", "content": student.system_prompt}
    assert student.system_prompt.count('"name": "search"') == 1


def test_a_teacher_becomes_ids():
    """A teacher's turn has the student's ids and its end of turn; a cut one has no end."""
    student = protocol()
    rollout, _, _ = teach(student, [chat(SCRIPT[1]), chat("<mem>ca", "length")])
    encode = student.tokenizer
    assert rollout.turns[0].completion_ids == encode(SCRIPT[1])["input_ids"] + [encode.eos_token_id]
    assert rollout.turns[1].completion_ids == encode("<mem>ca")["input_ids"]
    assert (rollout.outcome, rollout.turns[0].logps) == ("truncated", None)


@pytest.mark.parametrize("text", ["", None, "I don't know.", "<tool_call>{", "<answer>", "\ud800", "里德 \x00"])
def test_malformed_turns(text):
    """What a teacher says is a turn, however malformed, or nothing at all."""
    rollout, _, _ = teach(protocol(), [chat(text)] * 5)
    assert not rollout.well_formed and rollout.outcome in ("no_action", "out_of_turns")


def test_special_tokens_are_text():
    """A special token of the student in a teacher's text doesn't become one."""
    student = protocol()
    rollout, _, _ = teach(student, [chat(f"<think>{EOS} and <|im_start|>user</think><answer>cat</answer>")])
    ids = rollout.turns[0].completion_ids
    assert ids.count(student.tokenizer.eos_token_id) == 1 and ids[-1] == student.tokenizer.eos_token_id
    assert rollout.turns[0].text == "<think>< |im_end|> and < |im_start|>user</think><answer>cat</answer>"
    assert rollout.outcome == "answer"


def test_stop_at_action():
    """
    With stop sequences a turn ends at its action; the tag that endpoints leave out is put back, one that is there isn't
    doubled, and a cut turn stays cut.
    """
    searched = "<think>First.</think>" + call("Anna")
    replies = [
        chat(searched.removesuffix("</tool_call>")),
        chat("<mem>m</mem>" + call("cat")),
        chat(SCRIPT[2].removesuffix("</answer>")),
    ]
    rollout, requests, _ = teach(protocol(), replies, stop_at_action=True)
    assert [turn.text for turn in rollout.turns] == [searched, "<mem>m</mem>" + call("cat"), SCRIPT[2]]
    assert [request.body["stop"] for request in requests] == [["</tool_call>", "</answer>"]] * 3
    rollout, _, _ = teach(protocol(), [chat("<answer>ca", "length")], stop_at_action=True)
    assert (rollout.outcome, rollout.turns[0].text) == ("truncated", "<answer>ca")
    rollout, requests, _ = teach(protocol(), [chat("<answer>ca")])
    assert rollout.turns[0].text == "<answer>ca" and "stop" not in requests[0].body


def test_content_that_is_no_text():
    """Content in parts is refused by name."""
    with pytest.raises(GenerationError, match=r"returned the content \[\{'type'"):
        teach(protocol(), [chat([{"type": "text", "text": "a"}])])


def test_the_users_key(monkeypatch):
    """The key in `OPENAI_API_KEY` is sent to a teacher unless another variable is named."""
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")
    _, requests, _ = teach(protocol(), [chat(SCRIPT[2])])
    assert requests[0].headers["authorization"] == "Bearer user-key"
    _, requests, _ = teach(protocol(), [chat(SCRIPT[2])], api_key_env="STUB_KEY")
    assert requests[0].headers["authorization"] == "Bearer secret-key"
