"""What the model reads and how its turns are read: prompts, tool responses and turns, all as token ids."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from .parsing import TAGS, ParsedTurn, parse_turn
from .token_spans import decode, token_spans, tokens_of
from .tools import Toolbox


_SYSTEM_PROMPT = """You answer questions by searching, in turns.{rule}

Write each turn in this form:
{memory}<think>your reasoning about what to do next</think>
and then either one search
<tool_call>
{"name": "search", "arguments": {"query": "what to search for"}}
</tool_call>
or, as soon as you know enough, the answer
<answer>the answer</answer>

The answer is a name or a few words, without explanation. If several questions are asked, answer all of them in their order in one answer, separated by semicolons: <answer>a1; a2</answer>."""
_MEMORY_RULE = (
    " In each turn you see only the question and your previous turn with its tool response, nothing earlier: whatever "
    "you will need later has to be in your memory."
)
_MEMORY_FORM = (
    "<mem>everything worth keeping from your earlier memory and the last tool response, and what is still missing "
    "(from the second turn on)</mem>\n"
)

SYSTEM_PROMPTS = {
    "memory": _SYSTEM_PROMPT.replace("{rule}", _MEMORY_RULE).replace("{memory}", _MEMORY_FORM),
    "full": _SYSTEM_PROMPT.replace("{rule}", "").replace("{memory}", ""),
}
"""Default system prompt of each `context`. The tools are added by the chat template or, where it can't, as text."""

TOOLS_TEXT = "\n\nThese are the tools, as JSON schemas:\n{schemas}"
CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"

# A turn with every part that a template could drop, in the order in which the model writes them.
_PROBE_PARTS = (
    "<mem>probe memory</mem>\n",
    "<think>\nprobe thought\n</think>\n\n",
    '<tool_call>\n{"name": "probe", "arguments": {}}\n</tool_call>',
)
_SENTINEL = "PROBE-TURN"


@dataclass(frozen=True)
class ReadTurn:
    """
    One turn as the protocol reads it from the sampled ids.

    Args:
        parsed ([`~mempo_trl.parsing.ParsedTurn`]):
            What the text says.
        text (`str`):
            Decoded text without the end-of-turn token.
        memory_span (`tuple[int, int]`, *optional*):
            Half-open token span of the memory block, from the token that opens `<mem>` to the one that closes it.
        think_span (`tuple[int, int]`, *optional*):
            Half-open token span of the think block, likewise.
        answer_span (`tuple[int, int]`, *optional*):
            Half-open token span of the text inside `<answer>`.
        carried (`int`):
            Number of sampled ids that the next prompt repeats: all of them, unless something follows the action or
            the turn ended with another end-of-turn token than the template's.
    """

    parsed: ParsedTurn
    text: str
    memory_span: tuple[int, int] | None
    think_span: tuple[int, int] | None
    answer_span: tuple[int, int] | None
    carried: int


def load_chat_template(name_or_path: str) -> str:
    """
    Chat template from a file, or one that ships with the package (`"chatml"`).

    Raises:
        ValueError: If it is neither; the message lists the names.
    """
    shipped = {path.stem: path for path in CHAT_TEMPLATES.glob("*.jinja")}
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ValueError(
            f"`chat_template_path` is {name_or_path!r}, which is neither a file nor one of {sorted(shipped)}."
        )
    return _read("chat_template_path", path)


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{name}` is {str(path)!r}, which is no text in UTF-8: {error}. Save it as UTF-8.") from None


def _read_system_prompt(text_or_path: str) -> str:
    # A text of several lines or of a whole paragraph is no path, and `is_file` fails on a name that is too long.
    if "\n" in text_or_path or len(text_or_path) >= 256:
        return text_or_path
    if Path(text_or_path).is_file():
        return _read("system_prompt", Path(text_or_path))
    if text_or_path.endswith((".txt", ".md")):
        raise ValueError(f"`system_prompt` is {text_or_path!r}, and there is no such file.")
    return text_or_path


class Protocol:
    """
    The dialogue between the model and its tools, in token ids.

    The chat template is asked for two things only: the prefix (system and question, up to the header of the
    assistant's turn), and what lies between the end of one turn and the start of the next. What the model wrote is
    carried as the ids that were sampled, never rendered again.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template.
        toolbox ([`~mempo_trl.tools.Toolbox`]):
            The tools; only their schemas are used here.
        context (`str`, *optional*, defaults to `"memory"`):
            `"memory"` (each turn sees the last one only) or `"full"` (it sees all). Chooses the default system prompt,
            and whether memory is required from the second turn on.
        system_prompt (`str`, *optional*):
            System prompt instead of the default one: a text, or the path of a text file. It is used as it is, except
            that `{tools}` in it stands for the JSON schemas of the tools, which the chat template then doesn't repeat.
        chat_template_kwargs (`dict`, *optional*):
            Keyword arguments for the chat template.
        eos_token_ids (`list[int]`, *optional*):
            Ids that end a turn. Defaults to the tokenizer's own.
        max_tool_response_length (`int`, *optional*):
            Tokens after which a tool response is cut.

    Raises:
        ValueError: If the tokenizer has no chat template, or if its template would lose or change what the model
            wrote in its last turn; the message says which text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        toolbox: Toolbox,
        context: str = "memory",
        system_prompt: str | None = None,
        chat_template_kwargs: dict | None = None,
        eos_token_ids: list[int] | None = None,
        max_tool_response_length: int | None = None,
    ):
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Set `chat_template_path`, for example "
                "to 'chatml', or use an instruct model."
            )
        self.tokenizer = tokenizer
        self.toolbox = toolbox
        self.context = context
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_tool_response_length = max_tool_response_length
        # Retrieved text and questions must not become special tokens or tags of the protocol (see `neutralize`).
        # White space is no mark: some tokenizers add runs of spaces or line breaks as tokens.
        names = {token.content for token in tokenizer.added_tokens_decoder.values() if len(token.content.strip()) > 2}
        names |= {f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")}
        self._reserved = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None

        template_states_tools = self._template_states_tools()
        if system_prompt is not None:
            system_prompt = _read_system_prompt(system_prompt)
        # Tools are stated once: by the template, or as text where it can't or where the system prompt places them.
        self._template_tools = template_states_tools and "{tools}" not in (system_prompt or "")
        self.system_prompt = self._make_system_prompt(system_prompt)
        self._system_role = self._renders([{"role": "system", "content": _SENTINEL}, {"role": "user", "content": "q"}])
        tool_message = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "tool", "name": "probe", "content": _SENTINEL},
        ]
        self._tool_role = template_states_tools and self._renders(tool_message)
        rendered = self._check_turn_survives()
        self.set_eos_token_ids(eos_token_ids or [tokenizer.eos_token_id])
        self._check_prefix_survives(rendered)

    def set_eos_token_ids(self, eos_token_ids: list[int]) -> None:
        """Set the ids that end a turn; a model may declare more of them than its tokenizer."""
        self.eos_token_ids = list(eos_token_ids)
        # `None` where the template ends a turn with something that a model does not sample as one end-of-turn id.
        self.end_of_turn_id: int | None = None
        first_ids = self.response_ids([], "")[:1]
        if first_ids and first_ids[0] in self.eos_token_ids:
            self.end_of_turn_id = first_ids[0]

    def _apply_template(self, messages: list[dict], generate: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.toolbox.schemas if self._template_tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.chat_template_kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path!r} can't render text messages with the roles "
                f"{roles}: {error}. Set `chat_template_path` to a template that can, for example 'chatml'."
            ) from error

    def _renders(self, messages: list[dict]) -> bool:
        """Whether the template takes these messages and shows the sentinel in them."""
        try:
            return _SENTINEL in self._apply_template(messages, generate=True)
        except ValueError:
            return False

    def _template_states_tools(self) -> bool:
        """Whether the template shows tools by itself, in the form that `parse_turn` reads (Hermes style, as Qwen's)."""
        self._template_tools = True
        try:
            text = self._apply_template([{"role": "user", "content": "q"}], generate=True)
        except ValueError:
            return False
        return all(name in text for name in self.toolbox.tools) and "<tool_call>" in text and '"arguments"' in text

    def _make_system_prompt(self, system_prompt: str | None) -> str:
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.toolbox.schemas)
        if system_prompt is None:
            return SYSTEM_PROMPTS[self.context] + ("" if self._template_tools else TOOLS_TEXT.format(schemas=schemas))
        return system_prompt.replace("{tools}", schemas)

    def _check_turn_survives(self) -> str:
        """The next prompt as the template renders it from messages, which has to show the last turn unchanged."""
        turn = "".join(_PROBE_PARTS)
        rendered = self._apply_template(
            [
                *self.messages("probe question"),
                {"role": "assistant", "content": turn},
                self._response_message("found"),
            ],
            generate=True,
        )
        if turn not in rendered:
            position, lost = 0, []
            for part in _PROBE_PARTS:  # each part must be there, after the one before it
                found = rendered.find(part, position)
                if found < 0:
                    lost.append(part)
                else:
                    position = found + len(part)
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path!r} loses or changes what the model wrote in its "
                f"last turn: of {turn!r} it does not keep {''.join(lost) or turn!r} in place. An agent served with "
                "this template would not see its memory. Set `chat_template_path` to a template that keeps the text, "
                "for example 'chatml' (ChatML with tools, for Qwen3 and other ChatML models)."
            )
        return rendered

    def _check_prefix_survives(self, rendered: str) -> None:
        """Compare the next prompt as it was rendered from messages with the one made of ids."""
        turn_ids = self.encode("".join(_PROBE_PARTS))
        prefix_ids = self.prefix_ids("probe question")
        ours = decode(self.tokenizer, prefix_ids + turn_ids + self.response_ids(turn_ids, "found"))
        # Some tokenizers don't decode to the bytes they encoded; the rendered text must go through the same.
        if ours != decode(self.tokenizer, self.encode(rendered)):
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path!r} renders the start of a conversation in another "
                f"way once a turn follows.\nFrom messages: {rendered!r}\nFrom token ids: {ours!r}\nSet "
                "`chat_template_path` to a template whose prompts extend one another, for example 'chatml'."
            )

    def messages(self, question: str) -> list[dict]:
        """System and user message of a question; one user message where the template has no system role."""
        question = self.neutralize(question)
        if not self._system_role:
            return [{"role": "user", "content": f"{self.system_prompt}\n\n{question}"}]
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def _response_message(self, response: str) -> dict:
        if self._tool_role:
            return {"role": "tool", "name": next(iter(self.toolbox.tools)), "content": response}
        return {"role": "user", "content": f"<tool_response>\n{response}\n</tool_response>"}

    def neutralize(self, text: str) -> str:
        """Break every special token and tag in foreign text (`<answer>` becomes `< answer>`), so that it stays text."""
        while True:  # again, as names may overlap
            broken = self._reserved.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
            if broken == text:
                break
            text = broken
        # Some tokenizers make a name out of other characters, such as full-width brackets, before they look for it.
        if self._normalizer is not None and self._reserved.search(normal := self._normalizer.normalize_str(text)):
            return self.neutralize(normal)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; its special tokens are recognised, none is added."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prefix_ids(self, question: str) -> list[int]:
        """
        The prefix: system prompt, question, and the header of the assistant's turn (the article's
        `mem_sys_prompt_ids`).

        Args:
            question (`str`):
                The question; several objectives are one text.

        Returns:
            `list[int]`: Token ids, the clean start of every context of this question.
        """
        return self.encode(self._apply_template(self.messages(question), generate=True))

    def read_turn(self, ids: list[int]) -> ReadTurn:
        """
        Read a turn from its sampled ids.

        Args:
            ids (`list[int]`):
                Sampled ids, with or without the id that ended the turn. May be empty.

        Returns:
            [`ReadTurn`]
        """
        length = len(ids)
        while length and ids[length - 1] in self.eos_token_ids:
            length -= 1
        text, spans = token_spans(self.tokenizer, ids[:length])
        parsed = parse_turn(text, self.toolbox.check)
        memory_span, think_span = (
            None if block is None else tokens_of(spans, block.start, block.end)
            for block in (parsed.memory, parsed.think)
        )
        answer_span = None
        if parsed.outcome == "answer":
            answer_span = tokens_of(spans, parsed.action.inner_start, parsed.action.inner_end)
        if parsed.trailing_text:
            carried = tokens_of(spans, 0, parsed.action_end)[1]
        else:  # with the sampled end of turn, if it is the one that the template writes there
            carried = length + int(ids[length : length + 1] == [self.end_of_turn_id])
        return ReadTurn(parsed, text, memory_span, think_span, answer_span, carried)

    def response_ids(self, carried_ids: list[int], response: str) -> list[int]:
        """
        Ids between a turn and the next one: end of turn, tool response, header of the assistant's turn.

        They continue `carried_ids`: the end-of-turn token is left out if the model sampled it itself.

        Args:
            carried_ids (`list[int]`):
                The sampled ids that the next prompt repeats, `ids[:turn.carried]`.
            response (`str`):
                Text of the tool response. Special tokens and tags in it are broken; it is cut at its end to
                `max_tool_response_length` tokens.

        Returns:
            `list[int]`: Token ids.
        """
        response = self.neutralize(response)
        if self.max_tool_response_length is not None:
            ids = self.encode(response)
            if len(ids) > self.max_tool_response_length:
                response = decode(self.tokenizer, ids[: self.max_tool_response_length]).rstrip("\ufffd")
                response = self.neutralize(response)  # a tokenizer's decoder may have closed the gaps
        rendered = self._apply_template(
            [*self.messages("q"), {"role": "assistant", "content": _SENTINEL}, self._response_message(response)],
            generate=True,
        )
        ids = self.encode(rendered.split(_SENTINEL, 1)[1])
        return ids[1:] if carried_ids[-1:] == [self.end_of_turn_id] else ids
