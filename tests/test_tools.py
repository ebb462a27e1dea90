import asyncio
import threading
import time

import pytest
from conftest import search

from mempo_trl import tools
from mempo_trl.tools import NO_RESULTS, Toolbox, ToolError, ToolResult, tool_name


async def search_async(query: str, k: int = 3) -> str:
    """
    Searches without blocking.

    Args:
        query: What to search for.
        k: Number of passages.
    """
    await asyncio.sleep(0)
    return f"{k} passages about {query}"


class Search:
    """A tool with a state."""

    def __init__(self, name="find"):
        self.name = name
        self.queries = []

    def __call__(self, query: str) -> str:
        """
        Finds passages.

        Args:
            query: What to find.
        """
        self.queries.append(query)
        return f"found {query}"

    def lookup(self, page: str) -> str:
        """
        Opens a page.

        Args:
            page: Title of the page.
        """
        return f"page {page}"


class SearchAsync(Search):
    async def __call__(self, query: str) -> str:
        """
        Finds passages without blocking.

        Args:
            query: What to find.
        """
        await asyncio.sleep(0)
        return f"found {query} later"


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between attempts, recorded instead of waited for; back-off without jitter."""
    recorded = []

    async def sleep(seconds):
        recorded.append(seconds)

    monkeypatch.setattr(tools.asyncio, "sleep", sleep)
    monkeypatch.setattr(tools.random, "uniform", lambda low, high: high)
    return recorded


def run(toolbox, name="search", **arguments) -> ToolResult:
    return asyncio.run(toolbox.call(name, arguments or {"query": "cats"}))


def returning(*results):
    """A search tool that gives one result after the other and raises those that are exceptions."""
    results = iter(results)

    def search(query: str):
        """
        Searches.

        Args:
            query: What to search for.
        """
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    return search


@pytest.mark.parametrize(
    ("tool", "name", "description", "parameter"),
    [
        (search, "search", "Searches the village.", "query"),
        (search_async, "search_async", "Searches without blocking.", "query"),
        (Search(), "find", "Finds passages.", "query"),
        (SearchAsync(), "find", "Finds passages without blocking.", "query"),
        (Search().lookup, "lookup", "Opens a page.", "page"),
    ],
    ids=["function", "async function", "object", "async object", "bound method"],
)
def test_schema(tool, name, description, parameter):
    """The schema of every kind of tool has its name, its description and its arguments, without `self`."""
    function = Toolbox([tool]).schemas[0]["function"]
    assert (tool_name(tool), function["name"], function["description"]) == (name, name, description)
    assert function["parameters"]["required"] == [parameter]
    assert function["parameters"]["properties"][parameter]["type"] == "string"
    assert "self" not in function["parameters"]["properties"]


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        (search, {"query": "Anna"}, "Doc 1(Title: Anna) Anna has a cat."),
        (search_async, {"query": "Anna"}, "3 passages about Anna"),
        (search_async, {"query": "Anna", "k": 1}, "1 passages about Anna"),
        (Search(), {"query": "Anna"}, "found Anna"),
        (SearchAsync(), {"query": "Anna"}, "found Anna later"),
        (Search().lookup, {"page": "Anna"}, "page Anna"),
    ],
)
def test_call(tool, arguments, text):
    """Every kind of tool is called with the arguments and gives its text."""
    toolbox = Toolbox([tool], retries=0)
    assert toolbox.check(tool_name(tool), arguments) is None
    result = run(toolbox, tool_name(tool), **arguments)
    assert (result.text, result.error, result.empty) == (text, None, False)
    assert result.seconds >= 0


def test_refused_tools():
    """No tool, and two tools of one name, are errors of the one who builds the run."""
    with pytest.raises(ValueError, match="`tools` is empty"):
        Toolbox([])
    with pytest.raises(ValueError, match="Two tools have the same name: .'find', 'find'."):
        Toolbox([Search(), Search()])
    assert set(Toolbox([Search("one"), Search("two")]).tools) == {"one", "two"}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("search_async", {"query": "x"}, None),
        ("search_async", {"query": "x", "k": 2}, None),
        ("search_async", {"query": ""}, None),
        ("search_async", {}, "'query' is a required property"),
        ("search_async", {"k": 2}, "'query' is a required property"),
        ("search_async", {"query": "x", "k": "2"}, "'2' is not of type 'integer'"),
        ("search_async", {"query": "x", "k": True}, "True is not of type 'integer'"),
        ("search_async", {"query": "x", "n": 2}, "'n' was unexpected"),
        ("search_async", {"query": ["x"]}, "['x'] is not of type 'string'"),
        ("search_async", {"query": None}, "None is not of type 'string'"),
        ("search_async", "x", "`arguments` must be a JSON object, not 'x'"),
        ("search_async", None, "`arguments` must be a JSON object, not None"),
        ("search_async", ["x"], "`arguments` must be a JSON object, not ['x']"),
        ("Search_async", {"query": "x"}, "there is no tool named 'Search_async'; the tools are search_async, find"),
        ("", {}, "there is no tool named ''"),
        (None, {}, "there is no tool named None"),
        ({}, {}, "there is no tool named {}"),
    ],
)
def test_check(name, arguments, says):
    """A call that can't be made is refused in words for the model, before any tool runs."""
    error = Toolbox([search_async, Search()]).check(name, arguments)
    if says is None:
        assert error is None
    else:
        assert says in error


def test_check_of_optional_arguments():
    """`null` is accepted where the tool's type says so, as models write it, and a tool may take no argument."""

    def search(query: str, site: str | None = None) -> str:
        """
        Searches.

        Args:
            query: What to search for.
            site: Where to search.
        """
        return f"{query} {site}"

    def today() -> str:
        """Tells the date."""
        return "Monday"

    toolbox = Toolbox([search, today], retries=0)
    for arguments in ({"query": "x"}, {"query": "x", "site": None}, {"query": "x", "site": "y"}):
        assert toolbox.check("search", arguments) is None
    assert "3 is not of type 'string', 'null'" in toolbox.check("search", {"query": "x", "site": 3})
    assert "None is not of type 'string'" in toolbox.check("search", {"query": None})
    assert toolbox.check("today", {}) is None
    assert "'query' was unexpected" in toolbox.check("today", {"query": "x"})
    assert asyncio.run(toolbox.call("today", {})).text == "Monday"


@pytest.mark.parametrize(
    ("result", "text"),
    [(7, "7"), (["a", "b"], "['a', 'b']"), (" kept \n", " kept \n"), (NO_RESULTS, NO_RESULTS), ("0", "0")],
)
def test_result_becomes_text(result, text):
    """What a tool returns reaches the model as text; only the sentence for nothing found counts as empty."""
    outcome = run(Toolbox([returning(result)], retries=0))
    assert (outcome.text, outcome.error, outcome.empty) == (text, None, result == NO_RESULTS)


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (None, "ToolError: the tool returned NoneType instead of text"),
        (b"page", "ToolError: the tool returned bytes instead of text"),
        ("", "ToolError: the tool returned an empty text"),
        (" \n", "ToolError: the tool returned an empty text"),
        (ToolError("500 from http://localhost:1"), "ToolError: 500 from http://localhost:1"),
        (ValueError("no"), "ValueError: no"),
        (KeyError("result"), "KeyError: 'result'"),
        # A tool's own time-out names its server, and is not taken for ours.
        (TimeoutError("no answer from http://localhost:1"), "TimeoutError: no answer from http://localhost:1"),
    ],
)
def test_failure(result, cause):
    """A failed call never raises: the model is told that it could not be made, which is not "nothing found"."""
    outcome = run(Toolbox([returning(result)], retries=0))
    assert outcome.error == cause
    assert outcome.text == (
        "The call of search could not be made because of a technical problem. This does not mean that nothing exists."
    )
    assert not outcome.empty


def test_half_a_character_in_a_result():
    """Half of a surrogate pair in a page, which no tokenizer takes, is replaced."""
    assert run(Toolbox([returning("a \ud83d b")], retries=0)).text == "a ? b"


def test_retries(pauses):
    """A call is tried again after pauses that double; the first success counts."""
    result = run(Toolbox([returning(ToolError("1"), None, ValueError("3"), "found")], retries=3))
    assert (result.text, result.error) == ("found", None)
    assert pauses == [1, 2, 4]


def test_retries_are_limited(pauses):
    """After the last retry the last cause is reported; no pause follows it."""
    result = run(Toolbox([returning(ToolError("1"), ToolError("2"), ToolError("3"), "too late")], retries=2))
    assert result.error == "ToolError: 3"
    assert pauses == [1, 2]


@pytest.mark.parametrize("blocking", [True, False])
def test_time_out(blocking):
    """An attempt is given up after `timeout` seconds, whether the tool blocks its thread or awaits."""
    go_on = threading.Event()

    def search(query: str) -> str:
        """
        Hangs.

        Args:
            query: What to search for.
        """
        go_on.wait(60)
        return "too late"

    async def hang(query: str) -> str:
        """
        Hangs.

        Args:
            query: What to search for.
        """
        await asyncio.sleep(60)
        return "too late"

    start = time.perf_counter()
    tool = search if blocking else hang
    result = run(Toolbox([tool], timeout=0.1, retries=0), tool.__name__)
    # The event loop has ended as well: it did not wait for the thread that hangs.
    assert time.perf_counter() - start < 30
    go_on.set()
    assert result.error == "no answer within 0.1 s"
    assert result.seconds >= 0.1


def test_calls_run_at_the_same_time():
    """Blocking tools of several rollouts run side by side: each of four waits for all the others to start."""
    together = threading.Barrier(4, timeout=30)

    def search(query: str) -> str:
        """
        Meets the others.

        Args:
            query: What to search for.
        """
        together.wait()
        return query

    async def four(toolbox):
        return await asyncio.gather(*(toolbox.call("search", {"query": str(i)}) for i in range(4)))

    results = asyncio.run(four(Toolbox([search], retries=0)))
    assert [(result.text, result.error) for result in results] == [("0", None), ("1", None), ("2", None), ("3", None)]


def test_toolbox_outlives_the_event_loop():
    """One toolbox serves many generation batches, each with an event loop of its own."""
    toolbox = Toolbox([search], retries=0)
    assert [run(toolbox).error for _ in range(3)] == [None] * 3
