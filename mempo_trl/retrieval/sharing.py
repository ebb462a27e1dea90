"""Searches of one generation batch: equal ones are made once, and those that come together are made in one call."""

import asyncio

from ..tools import NO_RESULTS, Toolbox, ToolResult, as_text
from .tool import SearchTool


class SharedSearches:
    """
    Calls the tools of one generation batch, in one event loop. A search that equals an earlier one gets its result, or
    waits for it; distinct searches that start in the same moment, as those of a turn do, are given to the retriever
    as one list, as far as the tool's `max_batch` allows. Nothing waits for others to come.

    A failure is shared by those who waited for the search, and each tries again; what failed in a list is then
    searched by itself, so that one bad query fails no other, and without retries there are no lists. An empty result
    is not kept, because an engine that throttles may give one. Only a [`SearchTool`] is shared: other tools, its
    subclasses included, may do more than answer, and are called each time.

    Args:
        toolbox ([`~mempo_trl.tools.Toolbox`]):
            The tools, with their time-out and retries.

    Attributes:
        searches (`int`):
            Searches so far, retries included.
        shared (`int`):
            Those of them that an equal one answered.
    """

    def __init__(self, toolbox: Toolbox):
        self.toolbox = toolbox
        self.searches = 0
        self.shared = 0
        self._tasks: dict[tuple[str, str], asyncio.Task] = {}  # of tool and query
        self._open: dict[str, tuple[list[str], asyncio.Task]] = {}  # lists that are not searched yet, of each tool
        self._alone: set[tuple[str, str]] = set()

    async def call(self, name: str, arguments: dict) -> ToolResult:
        """As [`~mempo_trl.tools.Toolbox.call`]."""
        shared = type(self.toolbox.tools[name]) is SearchTool
        return await self.toolbox.call(name, arguments, self._attempt if shared else None)

    async def _attempt(self, name: str, arguments: dict) -> tuple[str | None, str | None]:
        query = arguments["query"]
        self.searches += 1
        if (name, query) in self._tasks:
            self.shared += 1
        else:
            self._tasks[name, query] = self._join(name, query)
        outcomes = await asyncio.shield(self._tasks[name, query])
        return outcomes[query]

    def _join(self, name: str, query: str) -> asyncio.Task:
        size = self.toolbox.tools[name].max_batch
        if size == 1 or self.toolbox.retries == 0 or (name, query) in self._alone:
            return asyncio.ensure_future(self._search(name, [query]))
        if name not in self._open:
            queries = []
            self._open[name] = queries, asyncio.ensure_future(self._search_list(name, queries))
        queries, task = self._open[name]
        queries.append(query)
        if len(queries) == size:
            del self._open[name]
        return task

    async def _search_list(self, name: str, queries: list[str]) -> dict[str, tuple[str | None, str | None]]:
        # A task begins after all that could run when it was made: whoever had its turn generated together has joined.
        if name in self._open and self._open[name][0] is queries:
            del self._open[name]
        return await self._search(name, queries)

    async def _search(self, name: str, queries: list[str]) -> dict[str, tuple[str | None, str | None]]:
        """For each query its text, or `None` and the cause."""
        if len(queries) == 1:
            text, cause = await self.toolbox.attempt(name, {"query": queries[0]})
            texts = [text]
        else:
            answer = self.toolbox.tools[name].answer
            texts, cause = await self.toolbox.attempt(name, {"queries": queries}, answer, _as_texts)
            if texts is None:
                texts = [None] * len(queries)
                self._alone.update((name, query) for query in queries)
        for query, text in zip(queries, texts, strict=True):
            if text in (None, NO_RESULTS):  # the next one searches again
                del self._tasks[name, query]
        return {query: (text, cause) for query, text in zip(queries, texts, strict=True)}


def _as_texts(results: list[str]) -> list[str]:
    return [as_text(result) for result in results]
