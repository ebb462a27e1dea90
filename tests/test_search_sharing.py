"""Tests of the searches of a generation batch: equal ones once, together where that helps, with everybody's own result."""

import asyncio
import threading

import pytest
from conftest import build, call, script_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.sharing import SharedSearches
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.tools import NO_RESULTS, Toolbox, ToolError


class Recorder:
    """A retriever that says what it was asked; `answer(query)` gives the text of its passage, or raises."""

    def __init__(self, answer=lambda query: f"about {query}"):
        self.answer = answer
        self.calls = []
        self._lock = threading.Lock()

    def search(self, queries, top_k):
        with self._lock:
            self.calls.append((list(queries), top_k))
        texts = [self.answer(query) for query in queries]
        return [
            [Document(query, query, text)] * top_k if text else [] for query, text in zip(queries, texts, strict=True)
        ]

    @property
    def queries(self):
        return sorted(query for queries, _ in self.calls for query in queries)


def together(searches, queries, name="search"):
    """Results of searches that start in the same moment."""

    async def run():
        return await asyncio.gather(*(searches.call(name, {"query": query}) for query in queries))

    return asyncio.run(run())


def toolbox(retriever, retries=1, timeout=60.0, **kwargs):
    return Toolbox([SearchTool(retriever, top_k=1, **kwargs)], retries=retries, timeout=timeout)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    """Attempts follow each other without a pause."""
    monkeypatch.setattr("mempo_trl.tools.random.uniform", lambda low, high: 0.0)


@pytest.mark.parametrize("max_batch", [1, 64])
def test_equal_searches_are_made_once(max_batch):
    """Whether they start together or one after the other; each caller gets what it would have found alone."""
    recorder = Recorder()
    searches = SharedSearches(toolbox(recorder, max_batch=max_batch))

    async def run():
        async def search(query):
            return (await searches.call("search", {"query": query})).text

        first = await asyncio.gather(*(search(query) for query in ("a", "b", "a", "A")))
        return first, [await search("b"), await search("c")]

    first, then = asyncio.run(run())
    found = {query: SearchTool(Recorder(), top_k=1)(query) for query in "abAc"}
    assert first == [found[query] for query in ("a", "b", "a", "A")] and then == [found["b"], found["c"]]
    assert recorder.queries == ["A", "a", "b", "c"]
    assert (searches.searches, searches.shared) == (6, 2)


def test_the_next_batch_searches_again():
    """What one generation batch found is not kept for the next one: an index may change, and memory is finite."""
    recorder = Recorder()
    tools = toolbox(recorder)
    for _ in range(2):
        together(SharedSearches(tools), ["a", "a"])
    assert recorder.queries == ["a", "a"]


def test_searches_of_a_turn_are_one_list():
    """Distinct searches that start together are one call of the retriever, in their order."""
    recorder = Recorder()
    results = together(SharedSearches(toolbox(recorder, max_batch=64)), ["a", "b", "a", "c"])
    assert recorder.calls == [(["a", "b", "c"], 1)]
    assert [result.text for result in results] == [f"Doc 1(Title: {q}) about {q}" for q in ("a", "b", "a", "c")]


def test_a_list_is_no_longer_than_max_batch():
    """Five queries under a limit of two are three calls."""
    recorder = Recorder()
    together(SharedSearches(toolbox(recorder, max_batch=2)), list("abcde"))
    assert sorted(queries for queries, _ in recorder.calls) == [["a", "b"], ["c", "d"], ["e"]]


def test_searches_without_lists_run_at_the_same_time():
    """With `max_batch=1` none waits for another: each of four searches returns only when all four are under way."""
    barrier = threading.Barrier(4)

    def answer(query):
        barrier.wait(timeout=30)
        return query

    recorder = Recorder(answer)
    results = together(SharedSearches(toolbox(recorder)), list("abcd"))
    assert [result.error for result in results] == [None] * 4 and len(recorder.calls) == 4


def test_a_search_that_comes_later_waits_for_nobody():
    """While a search hangs, another one is made: nothing queues behind it."""
    released = threading.Event()

    def answer(query):
        if query == "slow":
            assert released.wait(timeout=30)
        return query

    async def run():
        searches = SharedSearches(toolbox(Recorder(answer), max_batch=64))
        slow = asyncio.ensure_future(searches.call("search", {"query": "slow"}))
        await asyncio.sleep(0.01)
        fast = await searches.call("search", {"query": "fast"})
        assert not slow.done()
        released.set()
        return fast, await slow

    fast, slow = asyncio.run(run())
    assert fast.text == "Doc 1(Title: fast) fast" and slow.text == "Doc 1(Title: slow) slow"


def test_a_failure_is_shared_once_and_tried_again():
    """Those who waited fail together, each tries again, and the second attempt is shared like any search."""
    attempts = []

    def answer(query):
        attempts.append(query)
        if len(attempts) == 1:
            raise ToolError("the server is away")
        return query

    searches = SharedSearches(toolbox(Recorder(answer)))
    results = together(searches, ["a", "a", "a"])
    assert [result.text for result in results] == ["Doc 1(Title: a) a"] * 3
    assert attempts == ["a", "a"] and (searches.searches, searches.shared) == (6, 4)


def test_a_failure_for_good_is_told_to_each():
    """Every rollout gets the honest response, and a later equal search is made anew."""
    attempts = []

    def answer(query):
        attempts.append(query)
        raise ToolError("the server is away")

    async def run():
        searches = SharedSearches(toolbox(Recorder(answer), retries=0))
        first = await asyncio.gather(*(searches.call("search", {"query": "a"}) for _ in range(3)))
        return [*first, await searches.call("search", {"query": "a"})]

    results = asyncio.run(run())
    assert all("could not be made" in result.text for result in results)
    assert {result.error for result in results} == {"ToolError: the server is away"} and len(attempts) == 2


def test_a_bad_query_fails_alone():
    """A query that breaks the retriever costs those of its list an attempt and nothing else: then each is alone."""

    def answer(query):
        if query == "bad":
            raise ValueError("a query that the index can't read")
        return query

    recorder = Recorder(answer)
    results = together(SharedSearches(toolbox(recorder, max_batch=64)), ["a", "bad", "b", "bad"])
    assert [result.error for result in results] == [None, "ValueError: a query that the index can't read"] * 2
    lists = [queries for queries, _ in recorder.calls]
    assert lists[0] == ["a", "bad", "b"] and sorted(lists[1:]) == [["a"], ["b"], ["bad"]]


def test_without_retries_there_are_no_lists():
    """Nobody fails for a neighbour, also where there is no second attempt."""

    def answer(query):
        if query == "bad":
            raise ValueError("bad")
        return query

    recorder = Recorder(answer)
    results = together(SharedSearches(toolbox(recorder, max_batch=64, retries=0)), ["a", "bad", "b"])
    assert [result.error is None for result in results] == [True, False, True]
    assert sorted(queries for queries, _ in recorder.calls) == [["a"], ["b"], ["bad"]]


@pytest.mark.parametrize("max_batch", [1, 64])
def test_a_hanging_search_is_not_waited_for_twice(max_batch):
    """After a time-out the next attempt is a search of its own, for the one who began it and for those who joined."""
    released, attempts = threading.Event(), []

    def answer(query):
        attempts.append(query)
        if len(attempts) == 1:
            released.wait(timeout=30)
        return query

    searches = SharedSearches(toolbox(Recorder(answer), timeout=1.0, max_batch=max_batch))
    results = together(searches, ["a", "a", "b"])
    made = list(attempts)
    released.set()
    assert [result.text for result in results] == [f"Doc 1(Title: {query}) {query}" for query in "aab"]
    assert made[0] == "a" and sorted(made[1:]) == ["a", "b"]


def test_nothing_found_is_not_kept():
    """It is shared by those who wait for it, but not remembered, since an engine that throttles may say so."""
    found = iter(["", "now"])

    async def run():
        searches = SharedSearches(toolbox(Recorder(lambda query: next(found))))
        first = await asyncio.gather(*(searches.call("search", {"query": "a"}) for _ in range(2)))
        return [result.text for result in [*first, await searches.call("search", {"query": "a"})]]

    assert asyncio.run(run()) == [NO_RESULTS, NO_RESULTS, "Doc 1(Title: a) now"]


def test_a_retriever_that_gives_too_few_results_is_an_error():
    """Results that can't be told apart by their number belong to nobody."""

    class Short:
        def search(self, queries, top_k):
            return [[Document("1", "t", "x")]] if len(queries) > 1 else []

    results = together(SharedSearches(toolbox(Short(), max_batch=64)), ["a", "b"])
    assert {result.error for result in results} == {"ToolError: Short gave 0 lists of passages for 1 query"}


def test_tools_of_the_user_are_called_each_time():
    """They may have side effects: a function, an async one, and a subclass of the search tool."""
    calls = []

    def write(text: str) -> str:
        """
        Writes.

        Args:
            text: What.
        """
        calls.append(("write", text))
        return "written"

    async def send(text: str) -> str:
        """
        Sends.

        Args:
            text: What.
        """
        calls.append(("send", text))
        return "sent"

    class Counted(SearchTool):
        name = "counted"

        def search(self, query):
            calls.append(("counted", query))
            return super().search(query)

    searches = SharedSearches(Toolbox([write, send, Counted(Recorder(), top_k=1, max_batch=64)], retries=0))

    async def run():
        same = [("write", {"text": "x"}), ("send", {"text": "x"}), ("counted", {"query": "x"})] * 2
        return await asyncio.gather(*(searches.call(*arguments) for arguments in same))

    assert [result.text for result in asyncio.run(run())] == ["written", "sent", "Doc 1(Title: x) about x"] * 2
    assert sorted(calls) == sorted([("write", "x"), ("send", "x"), ("counted", "x")] * 2)
    assert (searches.searches, searches.shared) == (0, 0)


def test_two_search_tools_share_nothing():
    """The same query in two corpora is two searches."""
    first, second = SearchTool(Recorder(), top_k=1), SearchTool(Recorder(lambda query: "other"), top_k=1)
    second.name = "archive"
    searches = SharedSearches(Toolbox([first, second], retries=0))

    async def run():
        return await asyncio.gather(*(searches.call(name, {"query": "x"}) for name in ("search", "archive")))

    assert [result.text for result in asyncio.run(run())] == ["Doc 1(Title: x) about x", "Doc 1(Title: x) other"]


@settings(max_examples=40, deadline=None)
@given(
    waves=st.lists(st.lists(st.sampled_from(["a", "b", "c", "", "nothing", "bad"]), max_size=6), max_size=4),
    max_batch=st.integers(1, 4),
)
def test_results_are_those_of_separate_searches(waves, max_batch):
    """Whatever is asked in whatever order, everybody gets what a search of their own would have given."""

    def answer(query):
        if query == "bad":
            raise ValueError("bad")
        return "" if query == "nothing" else f"about {query}"

    searches = SharedSearches(toolbox(Recorder(answer), max_batch=max_batch))
    alone = toolbox(Recorder(answer))

    async def run():
        for wave in waves:
            results = await asyncio.gather(*(searches.call("search", {"query": query}) for query in wave))
            for query, result in zip(wave, results, strict=True):
                expected = await alone.call("search", {"query": query})
                assert (result.text, result.error) == (expected.text, expected.error)

    asyncio.run(run())


def test_max_batch_must_be_possible():
    """A limit of zero is refused when the tool is built."""
    with pytest.raises(ValueError, match="max_batch=0"):
        SearchTool(Recorder(), max_batch=0)


def test_a_group_that_asks_the_same(short_folder, tmp_path):
    """In training, a turn is one list of its distinct queries, and the share of the others is logged."""
    end = "<mem>m</mem><think>t</think><answer>cat</answer>"
    think = "<mem>m</mem><think>t</think>"
    rollouts = [
        [think + call("Anna"), think + call("Berta"), end],
        [think + call("Anna"), think + call("Anna"), end],
        [think + call("Clara"), end],
        [think + call("Anna"), end],
    ]
    recorder = Recorder()
    trainer = build(
        short_folder,
        tmp_path,
        script_of(*rollouts),
        tools=[SearchTool(recorder, top_k=1, max_batch=64)],
        tool_retries=1,
        num_generations=4,
        per_device_train_batch_size=4,
        max_steps=2,
    )
    trainer.train()
    # Turn 1: Anna, Anna, Clara, Anna; turn 2: Berta, and Anna once more. 3 searches for 6 calls, in each batch.
    assert [queries for queries, _ in recorder.calls] == [["Anna", "Clara"], ["Berta"]] * 2
    logs = [log for log in trainer.state.log_history if "tool/shared_frac" in log]
    assert [log["tool/shared_frac"] for log in logs] == [0.5, 0.5]
