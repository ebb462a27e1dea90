import asyncio
import subprocess
import sys
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


class Unprintable:
    def __str__(self):
        raise ValueError("no text")


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


SCRUBBED = "OSError: 401 for https://***@host/find?*** ( [31mred)"


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
        if isinstance(result, BaseException):
            raise result
        return result

    return search


def returning_later(*results):
    """The same as an async tool."""
    blocking = returning(*results)

    async def search(query: str):
        """
        Searches.

        Args:
            query: What to search for.
        """
        await asyncio.sleep(0)
        return blocking(query)

    return search


def hanging(event, timeout=60):
    """A tool whose calls wait for an event."""

    def search(query: str) -> str:
        """
        Hangs.

        Args:
            query: What to search for.
        """
        event.wait(timeout)
        return query

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


def test_the_schema_is_checked_once(monkeypatch):
    """A call is checked against its tool's schema; the schema itself was checked when the toolbox was made."""
    toolbox = Toolbox([search])
    monkeypatch.setattr("jsonschema.Draft202012Validator.check_schema", None)  # whoever calls it fails
    assert toolbox.check("search", {"query": "x"}) is None
    assert "is not of type 'string'" in toolbox.check("search", {"query": 1})


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
        (bytearray(b"page"), "ToolError: the tool returned bytearray instead of text"),
        (iter(["page"]), "ToolError: the tool returned list_iterator instead of text"),
        (Unprintable(), "ValueError: no text"),
        ("", "ToolError: the tool returned an empty text"),
        (" \n", "ToolError: the tool returned an empty text"),
        ("\x00\x1b", "ToolError: the tool returned an empty text"),
        (ToolError("500 from http://localhost:1"), "ToolError: 500 from http://localhost:1"),
        # These mean something to an event loop, or end a program.
        (StopAsyncIteration(3), "StopAsyncIteration: 3"),
        (asyncio.CancelledError("left"), "CancelledError: left"),
        (SystemExit(2), "SystemExit: 2"),
        (KeyboardInterrupt(), "KeyboardInterrupt:"),
        (Unprintable(), "ValueError: no text"),
        (UnprintableError(), "UnprintableError"),
        # One line, in which neither a key nor a terminal's command is left.
        (OSError("401 for\nhttps://me:pass@host/find?q=x&key=abc (\x1b[31mred)"), SCRUBBED),
        (OSError("x" * 600), "OSError: " + "x" * 491 + "…"),
        (ValueError("no"), "ValueError: no"),
        (KeyError("result"), "KeyError: 'result'"),
        # A tool's own time-out names its server, and is not taken for ours.
        (TimeoutError("no answer from http://localhost:1"), "TimeoutError: no answer from http://localhost:1"),
    ],
)
@pytest.mark.parametrize("made", [returning, returning_later])
def test_failure(made, result, cause):
    """A failed call never raises: the model is told that it could not be made, which is not "nothing found"."""
    outcome = run(Toolbox([made(result)], retries=0))
    assert outcome.error == cause
    assert outcome.text == (
        "The call of search could not be made because of a technical problem. This does not mean that nothing exists."
    )
    assert not outcome.empty


def test_stop_iteration():
    """The one exception that can't be put into a future is a failure like any other."""
    assert run(Toolbox([returning(StopIteration(3))], retries=0)).error == "StopIteration: 3"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("a \ud83d b", "a ? b"),  # half of a surrogate pair, which no tokenizer takes
        ("a\r\nb\rc\n\td", "a\nb\nc\n\td"),
        ("\x1b]0;title\x07\x1b[2Jred\x9b1m\x00", " ]0;title  [2Jred 1m "),  # what a terminal would obey
        ("caf\xe9 \u202e \U0001f600 \ufffd", "caf\xe9 \u202e \U0001f600 \ufffd"),
    ],
)
def test_characters_of_a_result(result, text):
    """Control characters are taken out of a result, other characters are kept."""
    assert run(Toolbox([returning(result)], retries=0)).text == text


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


async def stubborn(query: str) -> str:
    """
    Goes on when it is cancelled.

    Args:
        query: What to search for.
    """
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


@pytest.mark.parametrize("kind", ["blocking", "async", "blocking in async", "not cancelled"])
def test_time_out(kind):
    """An attempt is given up after `timeout` seconds, whatever the tool does meanwhile."""
    go_on = threading.Event()

    async def wait(query: str) -> str:
        """
        Hangs.

        Args:
            query: What to search for.
        """
        await asyncio.sleep(60)

    async def block(query: str) -> str:
        """
        Hangs.

        Args:
            query: What to search for.
        """
        go_on.wait(60)

    tool = {"blocking": hanging(go_on), "async": wait, "blocking in async": block, "not cancelled": stubborn}[kind]
    start = time.perf_counter()
    toolbox = Toolbox([tool, search_async], timeout=0.1, retries=0)
    result = run(toolbox, tool.__name__)
    # The event loop has ended as well: it did not wait for the thread that hangs.
    assert time.perf_counter() - start < 30
    assert result.error == "no answer within 0.1 s"
    assert result.seconds >= 0.1
    toolbox.timeout = 30  # nor do other async tools
    assert run(toolbox, "search_async").text == "3 passages about cats"
    go_on.set()


def test_hanging_calls_hold_nobody_up(monkeypatch):
    """A thread that hangs is replaced: with twice as many of them as there are threads, other calls are made at once."""
    monkeypatch.setattr(tools, "MAX_CONCURRENCY", 2)
    go_on = threading.Event()
    toolbox = Toolbox([hanging(go_on), Search("find")], timeout=0.05, retries=0)

    async def calls():
        return await asyncio.gather(*(toolbox.call("search", {"query": str(i)}) for i in range(4)))

    assert [result.error for result in asyncio.run(calls())] == ["no answer within 0.05 s"] * 4
    toolbox.timeout = 30
    assert run(toolbox, "find").text == "found cats"
    go_on.set()


def test_too_many_hanging_calls(monkeypatch, caplog):
    """Beyond a number of hanging calls no further one is made, with the reason; once they return, calls go on."""
    monkeypatch.setattr(tools, "MAX_HANGING", 4)
    go_on = threading.Event()
    toolbox = Toolbox([hanging(go_on), Search("find")], timeout=0.05, retries=0)
    for i in range(4):
        assert run(toolbox, query=f"q{i}").error == "no answer within 0.05 s"
    result = run(toolbox, "find")
    assert "4 calls hang, for " in result.error
    assert "the oldest, search({'query': 'q0'}); no further call is made" in result.error
    assert toolbox.tools["find"].queries == []
    # A line for the first, the second and the fourth of them.
    lines = [record.getMessage() for record in caplog.records if "the last of them" in record.getMessage()]
    assert [(line[0], line.split("the last of them ")[1][:24]) for line in lines] == [
        ("1", "search({'query': 'q0'})."),
        ("2", "search({'query': 'q1'})."),
        ("4", "search({'query': 'q3'})."),
    ]
    go_on.set()
    deadline = time.monotonic() + 30
    while (result := run(toolbox, "find")).error and time.monotonic() < deadline:
        time.sleep(0.01)
    assert result.text == "found cats"


def test_threads_end():
    """A thread serves one call after the other and ends when it has had nothing to do for a while."""
    threads = tools.DaemonThreads(idle_seconds=0.05)
    before = threading.active_count()
    names = {threads.submit(threading.current_thread).result(30) for _ in range(5)}
    assert all(thread.daemon for thread in names)
    for thread in names:
        thread.join(30)
    assert threading.active_count() <= before
    assert threads.submit(lambda: "again").result(30) == "again"


@pytest.mark.slow  # it imports transformers again
def test_process_ends_while_a_tool_hangs():
    """A tool that never returns, blocking or async, does not keep the process from ending."""
    code = """if True:
        import asyncio, threading
        from mempo_trl.tools import Toolbox

        def hang(query: str) -> str:
            '''
            Hangs.

            Args:
                query: What to search for.
            '''
            threading.Event().wait()

        async def hang_async(query: str) -> str:
            '''
            Hangs.

            Args:
                query: What to search for.
            '''
            threading.Event().wait()

        toolbox = Toolbox([hang, hang_async], timeout=0.1, retries=0)
        for name in toolbox.tools:
            print(asyncio.run(toolbox.call(name, {"query": "x"})).error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "no answer within 0.1 s\n" * 2), done.stderr


def test_async_tools_keep_their_event_loop():
    """An async tool has the same event loop in every generation batch, so that its connections stay usable."""
    loops = []

    async def search(query: str) -> str:
        """
        Notes its event loop.

        Args:
            query: What to search for.
        """
        loops.append(asyncio.get_running_loop())
        return query

    toolbox = Toolbox([search], retries=0)
    assert [run(toolbox).error for _ in range(2)] == [None, None]
    assert loops[0] is loops[1]


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
