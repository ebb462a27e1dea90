"""Generators that talk to servers: each turn is a request of its own, and no rollout waits for another one."""

import asyncio
import email.utils
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential

from .generation import Generation, GenerationError, Generator
from .parsing import TAGS
from .protocol import TOOLS_TEXT, Protocol
from .rollout import Rollout, Turn
from .token_spans import decode
from .tools import plain_text


logger = logging.getLogger(__name__)

T = TypeVar("T")
BACK_OFF = wait_random_exponential(multiplier=0.5, max=10)
_QUOTED = 500  # characters of a server's answer that an error message quotes


class Unavailable(Exception):
    """A request that may work later."""

    def __init__(self, cause: str, retry_after: float = 0.0):
        super().__init__(cause)
        self.retry_after = retry_after


@dataclass
class _Playing:
    """What is kept of a rollout while it is played."""

    number: int
    url: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


_playing: ContextVar[_Playing] = ContextVar("playing")


def _api_url(url: str) -> str:
    """Where the API is: as OpenAI's clients have it, and `/v1` of a server that is given without a path."""
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise ValueError(f"got the URL {url!r}; give one such as 'http://localhost:8000'.")
    if parsed.userinfo or parsed.query or parsed.fragment:  # it may be secret, and URLs are logged
        raise ValueError(
            f"The URL of {parsed.host!r} has a user, a query or a fragment. Leave it out; a key goes into the "
            "environment variable that `api_key_env` names."
        )
    return url.rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")


def _retry_after(response: httpx.Response) -> float:
    """Seconds of a `Retry-After` header, which holds either seconds or a date; 0 without one."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception()
    return max(BACK_OFF(state), error.retry_after)


class EndpointGenerator(Generator):
    """
    Takes turns from HTTP servers. A turn that a server can't give now (no connection, HTTP 429 or 5xx) is asked for
    again until `retry_seconds` are over, so that a server may be restarted; other errors rise at once.

    Requests are made within [`~Generator.run`], which opens the connections and closes them.

    Args:
        urls (`str` or `list[str]`):
            Base URL as OpenAI's clients take it, such as `"https://api.openai.com/v1"`; `/v1` is added to a server
            without a path, such as `"http://localhost:8000"`. Of several servers a new rollout takes the one with the
            fewest rollouts, and stays there.
        model (`str`):
            Name under which the server knows the model.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Tokens after which a turn is cut.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        max_concurrency (`int`, *optional*, defaults to `64`):
            Rollouts that are played at the same time.
        retry_seconds (`float`, *optional*, defaults to `300.0`):
            Time after the first attempt within which a request is made again.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds without an answer after which an attempt is given up.
        api_key_env (`str`, *optional*):
            Environment variable that holds the API key. It is sent as a bearer token and never logged.
        extra_body (`dict`, *optional*):
            Further fields of each request. A field that is there already is replaced, or left out if this is `None`.

    Raises:
        ValueError: If a URL or the environment variable can't be used.
    """

    path: str

    def __init__(
        self,
        urls: str | list[str],
        model: str,
        max_completion_length: int = 512,
        temperature: float = 1.0,
        max_concurrency: int = 64,
        retry_seconds: float = 300.0,
        timeout: float = 600.0,
        api_key_env: str | None = None,
        extra_body: dict | None = None,
    ):
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise ValueError("`urls` is empty; give the URL of at least one server.")
        if max_concurrency < 1:
            raise ValueError(f"got max_concurrency={max_concurrency}, expected at least 1.")
        self.urls = [_api_url(url) for url in urls]
        self.model = model
        self.max_completion_length = max_completion_length
        self.temperature = temperature
        self.max_concurrency = max_concurrency
        self.retry_seconds = retry_seconds
        self.timeout = timeout
        self.extra_body = extra_body or {}
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(f"The environment variable {api_key_env!r} is not set; it should hold the API key.")
        self._api_key = None if api_key_env is None else os.environ[api_key_env]
        self._client: httpx.AsyncClient | None = None
        self._load: Counter[str] = Counter()  # rollouts that are played on each server
        self._down: set[str] = set()
        self._started = 0

    async def run(self, rollouts: list[Coroutine], numbers: list[int] | None = None) -> list[Any]:
        self._down.clear()
        async with self._open_client() as self._client:
            return await super().run(rollouts, numbers)

    async def check(self) -> None:
        async with self._open_client() as client:
            for url in self.urls:
                try:
                    response = await client.get(f"{url}/models", timeout=30)
                except httpx.RequestError as error:
                    raise GenerationError(
                        f"There is no server at {url} ({self._hide(_cause(error))}). Start it, or correct the URL."
                    ) from None
                if response.status_code in (401, 403):  # other answers come from servers that don't list models
                    raise GenerationError(self._refusal(url, response))

    def usage(self) -> dict[str, int]:
        playing = _playing.get()
        return {"prompt_tokens": playing.prompt_tokens, "completion_tokens": playing.completion_tokens}

    def _open_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"},
            timeout=httpx.Timeout(self.timeout, connect=30, pool=None),
            # Idle connections are dropped before a server does it, vLLM after 5 s, just when they are used again.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=self.max_concurrency, keepalive_expiry=3.0
            ),
        )

    async def _play(self, rollout: Coroutine, number: int | None) -> Any:
        url = min(self.urls, key=lambda url: (url in self._down, self._load[url]))
        _playing.set(_Playing(self._started if number is None else number, url))
        self._started += 1
        self._load[url] += 1
        try:
            return await rollout
        finally:
            self._load[url] -= 1

    async def _request(self, body: dict) -> dict:
        """Post the body with what all requests share, and give the first choice."""
        playing = _playing.get()
        body = {"model": self.model, "temperature": self.temperature, **body, **self.extra_body}
        body = {name: value for name, value in body.items() if value is not None}
        data = await self._retry(playing.url, self._post, playing.url, body)
        self._down.discard(playing.url)
        usage = data.get("usage") or {}
        playing.prompt_tokens += usage.get("prompt_tokens") or 0
        playing.completion_tokens += usage.get("completion_tokens") or 0
        return data["choices"][0]

    async def _retry(self, url: str, ask: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `ask(*args)`, which is called again while it raises [`Unavailable`] and there is time."""
        retrying = AsyncRetrying(
            stop=stop_before_delay(self.retry_seconds),
            wait=_wait,
            retry=retry_if_exception_type(Unavailable),
            before_sleep=lambda state: self._log_wait(url, state),
            reraise=True,
        )
        start = time.monotonic()
        try:
            return await retrying(ask, *args)
        except Unavailable as error:
            raise GenerationError(
                f"{url} gave no answer within {time.monotonic() - start:.0f} s "
                f"({retrying.statistics['attempt_number']} attempts; `retry_seconds` is {self.retry_seconds:g}). "
                f"Last cause: {error}"
            ) from None

    async def _send(self, url: str, path: str, body: dict | None = None) -> httpx.Response:
        """An answer of a server, whatever its status: a POST with a body, a GET without one."""
        try:
            return await self._client.request("GET" if body is None else "POST", f"{url}/{path}", json=body)
        except httpx.RequestError as error:
            raise Unavailable(self._hide(_cause(error))) from None

    def _look_for_outage(self, response: httpx.Response) -> None:
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise Unavailable(
                f"HTTP {response.status_code}: {self._hide(response.text)}".rstrip(": "), _retry_after(response)
            )

    async def _post(self, url: str, body: dict) -> dict:
        response = await self._send(url, self.path, body)
        self._look_for_outage(response)
        if not response.is_success:
            await self._refused(url, response)
        try:
            data = response.json()
            reason = data["choices"][0]["finish_reason"]
        except (ValueError, LookupError, TypeError):
            raise Unavailable(f"an answer without a completion: {self._hide(response.text)!r}") from None
        if reason in ("abort", "error"):  # the server was stopped, or gave the turn up
            raise Unavailable(f"the server gave the turn up (`finish_reason` is {reason!r})")
        return data

    def _log_wait(self, url: str, state: RetryCallState) -> None:
        # One warning per outage: all rollouts that are on the server meet it.
        level = logging.INFO if url in self._down else logging.WARNING
        self._down.add(url)
        logger.log(
            level,
            "%s is not available (%s); trying again for up to %g s.",
            url,
            state.outcome.exception(),
            self.retry_seconds,
        )

    async def _refused(self, url: str, response: httpx.Response) -> None:
        """What becomes of a request that a server won't answer: it raises."""
        raise GenerationError(self._refusal(url, response))

    def _refusal(self, url: str, response: httpx.Response) -> str:
        return f"{url} answered with HTTP {response.status_code}: {self._hide(response.text)}"

    def _hide(self, text: str) -> str:
        """What a server said, as a message may quote it: not too long, and without the key."""
        if self._api_key:
            text = text.replace(self._api_key, "***")
        text = plain_text(text)
        return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


def _cause(error: httpx.RequestError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


class CompletionsGenerator(EndpointGenerator):
    """
    Token ids in, token ids and log-probabilities out: `/v1/completions` of a vLLM server.

    Log-probabilities are those of the distribution that was sampled from if the server runs with
    `--logprobs-mode processed_logprobs`.

    Args:
        urls, model:
            As in [`EndpointGenerator`]. The model is the policy or shares its tokenizer.
        eos_token_ids (`list[int]`):
            Ids that end a turn.
        seed (`int`, *optional*, defaults to `0`):
            From it the seed of each request is derived; they differ between rollouts and between turns.
        kwargs:
            As in [`EndpointGenerator`].
    """

    path = "completions"

    def __init__(self, urls: str | list[str], model: str, *, eos_token_ids: list[int], seed: int = 0, **kwargs):
        super().__init__(urls, model, **kwargs)
        self.eos_token_ids = eos_token_ids
        self.seed = seed

    async def served_models(self) -> list[dict]:
        """
        What each server serves, as soon as it is up.

        Returns:
            `list[dict]`: The first entry of each server's `/v1/models`, with `id` and, from vLLM, `max_model_len`.

        Raises:
            GenerationError: If a server isn't up within `retry_seconds`, or doesn't list its models.
        """
        async with self._open_client() as self._client:
            return list(await asyncio.gather(*[self._retry(url, self._served_model, url) for url in self.urls]))

    async def _served_model(self, url: str) -> dict:
        response = await self._send(url, "models")
        self._look_for_outage(response)
        try:
            return response.raise_for_status().json()["data"][0]
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
            raise GenerationError(f"{self._refusal(url, response)}. Expected the list of its models.") from None

    async def generate(self, prompt_ids: list[int], rollout: Rollout | None = None) -> Generation:
        turn = 0 if rollout is None else len(rollout.turns)
        choice = await self._request(
            {
                "prompt": prompt_ids,
                "max_tokens": self.max_completion_length,
                # The model is sampled as it is: a server would else take these from its `generation_config.json`.
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": self.eos_token_ids,
                "seed": random.Random(f"{self.seed}/{_playing.get().number}/{turn}").getrandbits(31),
                "logprobs": 0,
                "return_token_ids": True,
            }
        )
        server, ids = _playing.get().url, choice.get("token_ids")
        if ids is None:
            raise GenerationError(
                f"{server} returned no `token_ids`, so what it sampled is not known. Use a server that knows "
                "`return_token_ids`, such as vLLM."
            )
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(logps) != len(ids):
            raise GenerationError(f"{server} returned {len(logps)} log-probabilities for {len(ids)} tokens.")
        for i, logp in enumerate(logps):
            if logp is None or not math.isfinite(logp):
                raise GenerationError(f"{server} returned the log-probability {logp} for token {i} of {len(ids)}.")
        if len(ids) > self.max_completion_length:
            raise GenerationError(
                f"{server} returned {len(ids)} tokens, and at most {self.max_completion_length} were asked for."
            )
        return Generation(ids, logps, "length" if choice["finish_reason"] == "length" else "stop")


class ChatGenerator(EndpointGenerator):
    """
    Text in, text out: `/v1/chat/completions` of any OpenAI-compatible endpoint, as a teacher.

    The teacher sees what the student would see in its place: with `context="memory"` the question and the last turn
    with its tool response. Tool responses are user messages, since many endpoints take the role `tool` for answers to
    native tool calls only. The turns become ids of the student's tokenizer, with the id that ends a turn.

    Args:
        urls, model:
            As in [`EndpointGenerator`].
        protocol ([`~mempo_trl.protocol.Protocol`]):
            The student's.
        api_key_env (`str`, *optional*):
            Environment variable that holds the API key. Defaults to `OPENAI_API_KEY`, if that is set.
        stop_at_action (`bool`, *optional*, defaults to `False`):
            End a turn at `</tool_call>` or `</answer>` with stop sequences, for a teacher that would go on and invent
            the tool response. Endpoints leave the stop sequence out; it is put back.
        kwargs:
            As in [`EndpointGenerator`].
    """

    path = "chat/completions"

    def __init__(
        self,
        urls: str | list[str],
        model: str,
        *,
        protocol: Protocol,
        api_key_env: str | None = None,
        stop_at_action: bool = False,
        **kwargs,
    ):
        if api_key_env is None and os.environ.get("OPENAI_API_KEY"):
            api_key_env = "OPENAI_API_KEY"
        super().__init__(urls, model, api_key_env=api_key_env, **kwargs)
        self.protocol = protocol
        self.stop_at_action = stop_at_action
        # A special token in a teacher's text is text; in the student's ids it would be that token.
        special = {token.content for token in protocol.tokenizer.added_tokens_decoder.values() if token.special}
        special -= {f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    async def generate(self, prompt_ids: list[int], rollout: Rollout | None = None) -> Generation:
        choice = await self._request(
            {
                "messages": self.messages(rollout),
                "max_tokens": self.max_completion_length,
                "stop": ["</tool_call>", "</answer>"] if self.stop_at_action else None,
            }
        )
        text = (choice.get("message") or {}).get("content") or ""
        if not isinstance(text, str):
            server = _playing.get().url
            raise GenerationError(f"{server} returned the content {self._hide(repr(text))}; expected a text.")
        if self.stop_at_action and choice["finish_reason"] == "stop":
            opened = [tag for tag in ("tool_call", "answer") if text.count(f"<{tag}>") > text.count(f"</{tag}>")]
            text += "".join(f"</{tag}>" for tag in opened[:1])
        text = self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        text = text.encode(errors="replace").decode()  # half of a surrogate pair is no text for a tokenizer
        ids = self.protocol.encode(text)
        if choice["finish_reason"] == "length":
            return Generation(ids, None, "length")
        end_id = self.protocol.end_of_turn_id
        return Generation(ids + [self.protocol.tokenizer.eos_token_id if end_id is None else end_id])

    def messages(self, rollout: Rollout) -> list[dict]:
        """
        The next prompt of a rollout as chat messages.

        Args:
            rollout ([`~mempo_trl.rollout.Rollout`]):
                The rollout so far.

        Returns:
            `list[dict]`
        """
        messages, system_prompt = self.protocol.messages(rollout.question), self.protocol.system_prompt
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.protocol.toolbox.schemas)
        if schemas not in system_prompt:  # the student's chat template states the tools
            text = messages[0]["content"].removeprefix(system_prompt)
            messages[0]["content"] = system_prompt + TOOLS_TEXT.format(schemas=schemas) + text
        turns = rollout.turns[-1:] if self.protocol.context == "memory" else rollout.turns
        for turn in turns:
            messages += [
                {"role": "assistant", "content": self.protocol.read_turn(turn.carried_ids).text},
                {"role": "user", "content": f"<tool_response>\n{self._response(turn)}\n</tool_response>"},
            ]
        return messages

    def _response(self, turn: Turn) -> str:
        """The tool response as the student sees it."""
        response, limit = self.protocol.neutralize(turn.response), self.protocol.max_tool_response_length
        if limit is None or len(ids := self.protocol.encode(response)) <= limit:
            return response
        return decode(self.protocol.tokenizer, ids[:limit]).rstrip("\ufffd")
