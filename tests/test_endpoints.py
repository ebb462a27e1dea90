"""Generators that talk to servers, against a stub that answers, refuses, breaks off and comes back."""

import asyncio
import email.utils
import logging
import threading
import time
from functools import partial

import pytest
from stub_teacher import Reply, StubServer, closed_port, completion
from tenacity import AsyncRetrying, wait_none

from mempo_trl import endpoints
from mempo_trl.endpoints import CompletionsGenerator
from mempo_trl.generation import Generation, GenerationError, run_in_event_loop


END = 7


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch):
    """Attempts follow one another at once, and no key of the user is sent."""
    monkeypatch.setattr(endpoints, "BACK_OFF", wait_none())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def completions(*urls: str, **kwargs) -> CompletionsGenerator:
    kwargs = {"eos_token_ids": [END], "max_completion_length": 8, "retry_seconds": 60, **kwargs}
    return CompletionsGenerator(list(urls), "policy", **kwargs)


class Turns:
    """Stands for a rollout of which so many turns are played."""

    def __init__(self, count: int):
        self.turns = [None] * count


async def turns(generator, prompt: list[int], count: int = 1) -> list[Generation]:
    """Takes turns as a rollout does."""
    return [await generator.generate([*prompt, i], Turns(i)) for i in range(count)]


def run(generator, rollouts, numbers=None):
    """Run to the end, and fail instead of hanging."""
    return run_in_event_loop(asyncio.wait_for(generator.run(rollouts, numbers), timeout=60))


def one(generator, prompt=(1,)) -> Generation:
    return run(generator, [turns(generator, list(prompt))])[0][0]


# Completions: ids and log-probabilities.


def test_ids_and_logps():
    """Ids go in, and the sampled ids, their log-probabilities and the reason of the end come out as they are."""
    with StubServer(lambda request: completion([5, END], [-0.25, -1.5])) as server:
        assert one(completions(server.url), [3, 4]) == Generation([5, END], [-0.25, -1.5], "stop")
    (request,) = server.requests
    assert request.path == "/v1/completions"
    assert {name: request.body[name] for name in ("model", "prompt", "max_tokens", "temperature")} == {
        "model": "policy",
        "prompt": [3, 4, 0],
        "max_tokens": 8,
        "temperature": 1.0,
    }
    assert request.body["logprobs"] == 0 and request.body["return_token_ids"] is True
    assert request.body["stop_token_ids"] == [END]
    # What a server would else take from the model's own generation config.
    assert (request.body["top_p"], request.body["top_k"], request.body["repetition_penalty"]) == (1.0, -1, 1.0)
    assert "authorization" not in request.headers


def test_cut():
    """`finish_reason` "length" is a cut turn."""
    with StubServer(lambda request: completion([5] * 8, finish_reason="length")) as server:
        assert one(completions(server.url)).finish_reason == "length"


def test_extra_body():
    """Further fields are sent, replace those that are there, and with `None` take them away."""
    with StubServer(lambda request: completion([END])) as server:
        one(completions(server.url, temperature=0.5, extra_body={"top_k": 20, "min_p": None, "priority": 1}))
    body = server.requests[0].body
    assert (body["temperature"], body["top_k"], body["priority"], "min_p" in body) == (0.5, 20, 1, False)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (completion([5, END], [-0.5]), "1 log-probabilities for 2 tokens"),
        (completion([5], [-0.5, -0.5]), "2 log-probabilities for 1 tokens"),
        (completion([5, END], []), "0 log-probabilities for 2 tokens"),
        (completion([5, END], [-0.5, float("nan")]), "log-probability nan for token 1 of 2"),
        (completion([5, END], [None, -0.5]), "log-probability None for token 0 of 2"),
        (completion([5] * 9), "9 tokens, and at most 8"),
        (Reply({"choices": [{"text": "a", "finish_reason": "stop"}]}), "no `token_ids`.*vLLM"),
    ],
)
def test_wrong_completions(reply, says):
    """Ids and log-probabilities that don't fit together are an error that names the server; nothing is made up."""
    with StubServer(lambda request: reply) as server, pytest.raises(GenerationError, match=f"{server.port}.*{says}"):
        one(completions(server.url))
    assert len(server.requests) == 1


def test_no_tokens():
    """An empty completion is one, with no log-probabilities."""
    with StubServer(lambda request: completion([])) as server:
        assert one(completions(server.url)) == Generation([], [], "stop")


def test_seeds():
    """
    Seeds differ between the rollouts of a group and between turns, are the same for the same base seed, and belong to
    the number of the rollout if one is given; a second run of the generator goes on with other seeds.
    """
    prompts = ([1], [1], [1])

    def seeds(generator, numbers=None) -> dict[tuple, list[int]]:
        server.requests.clear()
        run(generator, [turns(generator, prompt, 2) for prompt in prompts], numbers)
        return sorted(request.body["seed"] for request in server.requests)

    with StubServer(lambda request: completion([END])) as server:
        generator = completions(server.url, seed=3)
        first, second = seeds(generator), seeds(generator)
        assert len(set(first)) == 6 and not set(first) & set(second)
        assert seeds(completions(server.url, seed=3)) == first != seeds(completions(server.url, seed=4))
        assert seeds(completions(server.url, seed=3), [0, 1, 2]) == first
        assert seeds(completions(server.url, seed=3), [3, 4, 5]) == second


# Who plays when, and where.


def test_no_turn_barrier():
    """A rollout of three turns is finished while another one still waits for its first."""
    finished = threading.Event()

    def answer(request):
        if request.body["prompt"][0] == 1:
            assert finished.wait(60)
        return completion([END])

    async def short(generator):
        await turns(generator, [2], 3)
        finished.set()
        return "short"

    with StubServer(answer) as server:
        generator = completions(server.url)
        results = run(generator, [turns(generator, [1]), short(generator)])
    assert results[1] == "short" and results[0][0].ids == [END]


def test_bounded_concurrency():
    """No more rollouts than `max_concurrency` are played at a time, and as many as that; results keep their order."""
    now, peak, both = 0, 0, threading.Barrier(2, timeout=60)

    def answer(request):
        both.wait()  # passes only if two requests are there at once
        return completion([request.body["prompt"][0], END])

    async def counted(generator, number):
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        (generation,) = await turns(generator, [number])
        now -= 1
        return generation.ids[0]

    with StubServer(answer) as server:
        generator = completions(server.url, max_concurrency=2)
        assert run(generator, [counted(generator, number) for number in range(6)]) == list(range(6))
    assert peak == 2


def test_a_rollout_stays_on_its_server():
    """New rollouts go where the fewest are, and all turns of a rollout go to the same server."""
    with StubServer(lambda r: completion([END])) as a, StubServer(lambda r: completion([END])) as b:
        generator = completions(a.url, b.url)
        run(generator, [turns(generator, [number], 3) for number in range(6)])
    of_a, of_b = ({request.body["prompt"][0] for request in server.requests} for server in (a, b))
    assert len(of_a) == len(of_b) == 3 and not of_a & of_b
    assert len(a.requests) == len(b.requests) == 9


def test_the_least_loaded_server():
    """A server whose rollouts are slow gets no new ones while the other one has fewer."""
    rest = threading.Event()

    def slow(request):
        assert rest.wait(60)
        return completion([END])

    with StubServer(slow) as a, StubServer(lambda request: completion([END])) as b:
        generator = completions(a.url, b.url, max_concurrency=2)

        async def last():
            made = await turns(generator, [9])
            rest.set()
            return made

        run(generator, [*(turns(generator, [number]) for number in range(5)), last()])
    assert [len(server.requests) for server in (a, b)] == [1, 5]


def test_an_error_ends_all():
    """An error in one rollout rises as it is, the others are cancelled, and what has not begun is closed."""

    async def broken():
        raise KeyError("broken")

    with StubServer(lambda request: completion([END])) as server:
        generator = completions(server.url, max_concurrency=1)
        with pytest.raises(KeyError, match="broken"):
            run(generator, [turns(generator, [1]), broken(), turns(generator, [2])])
        assert [request.body["prompt"][0] for request in server.requests] == [1]
        assert one(generator).ids == [END]  # and it can go on


# What may work later, and what never will.


@pytest.mark.parametrize(
    "fault",
    [
        Reply("busy", 429),
        Reply("busy", 503),
        Reply("<html>Internal Server Error</html>", 500),
        Reply(reset=True),
        Reply(""),
        Reply("<html>Welcome</html>"),
        Reply({"choices": []}),
        Reply({"error": "none"}),
        Reply([]),
        completion([5], finish_reason="abort"),
    ],
    ids=["429", "503", "500", "reset", "empty", "html", "no choices", "no completion", "a list", "aborted"],
)
def test_faults_that_pass(fault, caplog):
    """A request that meets a fault which may pass is made again, the same one, and warned of once."""
    replies = iter([fault, fault, completion([5, END])])
    with StubServer(lambda request: next(replies)) as server, caplog.at_level(logging.WARNING):
        assert one(completions(server.url)).ids == [5, END]
    assert len(server.requests) == 3
    assert server.requests[0].body == server.requests[2].body
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_faults_that_stay():
    """After `retry_seconds` the rollout fails, with the server, the number of attempts and the last cause."""
    with StubServer(lambda request: Reply("out of order", 503)) as server:
        with pytest.raises(GenerationError, match=rf"{server.port}/v1 gave no answer.*HTTP 503: out of order"):
            one(completions(server.url, retry_seconds=0.3))
    assert len(server.requests) > 1


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_refusals(status):
    """A request that the server refuses is an error at once, in the server's words, without the key."""
    words = {"error": {"message": "This model's maximum context length is 9; key secret-key"}}
    with StubServer(lambda request: Reply(words, status)) as server:
        with pytest.raises(GenerationError, match=rf"HTTP {status}: .*maximum context length is 9") as error:
            one(completions(server.url, api_key_env="STUB_KEY"))
    assert len(server.requests) == 1
    assert server.requests[0].headers["authorization"] == "Bearer secret-key"
    assert "secret-key" not in str(error.value) and "***" in str(error.value)


@pytest.fixture(autouse=True)
def stub_key(monkeypatch):
    monkeypatch.setenv("STUB_KEY", "secret-key")


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after(form, monkeypatch):
    """The client waits as long as a server asks for, in seconds or until a date, if it isn't told to stop before."""
    value = "30" if form == "seconds" else email.utils.formatdate(time.time() + 31, usegmt=True)
    waits, replies = [], iter([Reply("", 429, {"Retry-After": value}), completion([END])])

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(endpoints, "AsyncRetrying", partial(AsyncRetrying, sleep=sleep))
    with StubServer(lambda request: next(replies)) as server:
        one(completions(server.url))
    (wait,) = waits
    assert wait == 30 if form == "seconds" else 20 < wait <= 31
    with StubServer(lambda request: Reply("later", 429, {"Retry-After": "3600"})) as server:
        with pytest.raises(GenerationError, match=r"1 attempts.*HTTP 429: later"):
            one(completions(server.url))


@pytest.mark.parametrize("value", ["soon", "", "nan", "inf", "-5", "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_retry_after_that_says_nothing(value):
    """What is no time to come is no reason to wait."""
    replies = iter([Reply("", 503, {"Retry-After": value}), completion([END])])
    with StubServer(lambda request: next(replies)) as server:
        assert one(completions(server.url)).ids == [END]


def test_a_server_restarts():
    """Rollouts in play when the server goes and comes back are finished, none of them failed."""
    gone = threading.Event()

    def answer(request):
        if request.body["prompt"][-1] == 0:
            return completion([END])
        gone.set()
        return Reply(reset=True)

    with StubServer(answer) as server:
        generator = completions(server.url)
        restarted = []

        def restart():
            assert gone.wait(60)
            server.__exit__()  # from here on connections are refused
            restarted.append(StubServer(lambda request: completion([9, END]), server.port).__enter__())

        thread = threading.Thread(target=restart)
        thread.start()
        results = run(generator, [turns(generator, [number], 2) for number in range(4)])
        thread.join()
        restarted[0].__exit__()
    assert [made[1].ids for made in results] == [[9, END]] * 4


def test_a_server_that_is_down_gets_no_new_rollouts():
    """Of two servers the one that gives no answer isn't tried with every rollout, though it has the fewest."""
    with closed_port() as dead, StubServer(lambda request: completion([END])) as server:
        generator = completions(dead, server.url, max_concurrency=2, retry_seconds=0.2)

        async def survive(number):
            try:
                return await turns(generator, [number])
            except GenerationError:
                return None

        results = run(generator, [survive(number) for number in range(8)])
    assert results.count(None) == 1 and len(server.requests) == 7


# Before anything is played.


def test_check():
    """A server that is there is found, whatever it says of its models; one that isn't, or refuses the key, is named."""
    with StubServer(lambda request: completion([END])) as server:
        generator = completions(server.url, api_key_env="STUB_KEY")
        asyncio.run(generator.check())
        server.models = Reply("not found", 404)
        asyncio.run(generator.check())
        server.models = Reply("wrong key secret-key", 401)
        with pytest.raises(GenerationError, match=r"HTTP 401: wrong key \*\*\*"):
            asyncio.run(generator.check())
    with closed_port() as url, pytest.raises(GenerationError, match=rf"no server at {url}/v1 \(ConnectError"):
        asyncio.run(completions(url).check())


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://api.example.com/compatible/v2", "https://api.example.com/compatible/v2"),
    ],
)
def test_urls(given, used):
    """A server is given with or without `/v1`; a path of its own stays as it is."""
    assert completions(given).urls == [used]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_wrong_urls(url):
    """What is no URL of a server is an error that quotes it."""
    with pytest.raises(ValueError, match=f"got the URL '{url}'"):
        completions(url)


@pytest.mark.parametrize("url", ["http://u:secret@h:1", "http://h:1/v1?key=secret", "http://h:1/#secret"])
def test_no_secrets_in_urls(url):
    """A URL that may hold a secret is refused without quoting it, since URLs are logged."""
    with pytest.raises(ValueError, match="'h' has a user, a query or a fragment.*`api_key_env`") as error:
        completions(url)
    assert "secret" not in str(error.value)


def test_wrong_arguments():
    """No server, no room, and a key that is not set."""
    with pytest.raises(ValueError, match="`urls` is empty"):
        completions()
    with pytest.raises(ValueError, match="max_concurrency=0"):
        completions("http://localhost", max_concurrency=0)
    with pytest.raises(ValueError, match="'NO_SUCH_KEY' is not set"):
        completions("http://localhost", api_key_env="NO_SUCH_KEY")
