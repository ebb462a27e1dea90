"""Search on the web: Serper, Tavily, and any JSON endpoint that a template describes."""

import json
import os
from pathlib import Path
from typing import Any

import httpx

from .document import Document
from .http import as_text, check_search
from .json_client import JSONClient, fill_placeholders, gather, shown


TEMPLATES = {
    "serper": {
        "url": "https://google.serper.dev/search",
        "headers": {"X-API-KEY": "${SERPER_API_KEY}"},
        "body": {"q": "{query}", "num": "{top_k}"},
        "results": "organic",
        "title": "title",
        "text": "snippet",
        "id": "link",
        "success": "searchParameters",
    },
    "tavily": {
        "url": "https://api.tavily.com/search",
        "headers": {"Authorization": "Bearer ${TAVILY_API_KEY}"},
        "body": {"query": "{query}", "max_results": "{top_k}"},
        "results": "results",
        "title": "title",
        "text": "content",
        "id": "url",
    },
}
"""Descriptions of known endpoints, in the form of a template file."""

_REQUIRED = ("url", "body", "results", "title", "text", "id")
_OPTIONAL = ("method", "headers", "success")
_MISSING = object()


class WebRetriever:
    """
    Searches with an engine that answers in JSON. Searches may run in several threads at the same time.

    A template is a JSON object:

    - `url`, and `method` (`"POST"` by default; with `"GET"` the body goes into the query of the URL)
    - `headers` and `body`, in whose texts `${NAME}` stands for an environment variable, `{query}` for the query and a
      text that is just `"{top_k}"` for the number of passages
    - `results`: path of the list of results in the answer, such as `"web.results"`
    - `title`, `text` and `id`: their paths in a result; `id` is usually that of its address
    - `success` (optional): path of something that every successful answer has; where it is there, missing results mean
      that nothing was found, and otherwise that the search failed

    Keys belong into the environment: they are never logged, shown, cached or part of an error.

    Args:
        template (`str` or `os.PathLike`):
            `"serper"` (its key in `SERPER_API_KEY`), `"tavily"` (`TAVILY_API_KEY`), or the path of a JSON file.
        **settings:
            Keyword arguments of [`JSONClient`]: time-outs, retries, connections. At most 16 requests are under way at
            the same time by default.

    Attributes:
        corpus_hash (`None`):
            The web has none.
        counters (`dict`):
            `requests`, `retries`, `failures` (requests that failed for good) and `seconds` in requests, so far.

    Raises:
        ValueError: If the template is wrong or an environment variable is not set.

    Example:

    ```python
    >>> os.environ["SERPER_API_KEY"] = ...
    >>> WebRetriever("serper").search(["Who wrote The Trial?"], top_k=3)
    ```
    """

    corpus_hash = None

    def __init__(self, template: str | os.PathLike, **settings):
        self.template = TEMPLATES[template] if template in TEMPLATES else _read_template(template)
        self.name = str(template)
        self._url = httpx.URL(self.template["url"])
        self.url = shown(self._url)
        self._method = self.template.get("method", "POST")
        secrets = []

        def fill(text: str) -> str:
            filled, found = fill_placeholders(text, f"the web search {self.name!r}")
            secrets.extend(found)
            return filled

        headers = _map_texts(self.template.get("headers", {}), fill)
        self._body = _map_texts(self.template["body"], fill)
        settings = {"max_connections": 16, **settings}
        self._client = JSONClient(headers=headers, secrets=secrets, **settings)
        self.counters = self._client.counters

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best pages of each query, one request per query.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of pages per query.

        Returns:
            `list[list[Document]]`: For each query its pages, the best first. An empty list means that nothing was
            found.

        Raises:
            [`ToolError`]: The search could not be made, for example because a quota is used up. The message names the
                address and the last cause.
        """
        queries = check_search(queries, top_k)
        asked = [query for query in dict.fromkeys(queries) if query.strip()]
        found = dict(zip(asked, self._client.run(self._search_all(asked, top_k)), strict=True))
        return [found.get(query, [])[:top_k] for query in queries]

    async def _search_all(self, queries: list[str], top_k: int) -> list[list[Document]]:
        def fill(text: str, query: str) -> str | int:
            return top_k if text == "{top_k}" else text.replace("{query}", query)

        bodies = [_map_texts(self._body, lambda text, query=query: fill(text, query)) for query in queries]
        return await gather([self._client.send(self._method, self._url, body, self._read) for body in bodies])

    def _read(self, payload: Any) -> list[Document]:
        results = _follow(payload, self.template["results"])
        if results is _MISSING:
            if "success" in self.template and _follow(payload, self.template["success"]) is not _MISSING:
                return []
            raise ValueError(f'there are no results at "{self.template["results"]}"')
        if not isinstance(results, list):
            raise ValueError(f'expected a list of results at "{self.template["results"]}"')
        documents = []
        for result in results:
            fields = {name: _follow(result, self.template[name]) for name in ("id", "title", "text")}
            if fields["title"] is _MISSING and fields["text"] is _MISSING:
                raise ValueError(f'a result has neither "{self.template["title"]}" nor "{self.template["text"]}"')
            texts = {name: "" if field is _MISSING else as_text(field) for name, field in fields.items()}
            documents.append(Document(**texts))
        return documents


def _read_template(path: str | os.PathLike) -> dict:
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"`web_search` is {str(path)!r}, which is neither {' nor '.join(map(repr, TEMPLATES))} nor a file; give one "
            "of them, or the path of a JSON template."
        )
    try:
        template = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8 ({error}).") from None
    if not isinstance(template, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(template).__name__}.")
    missing = [key for key in _REQUIRED if key not in template]
    unknown = [key for key in template if key not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        raise ValueError(
            f"{path} lacks the keys {missing} and has the unknown keys {unknown}; it takes {', '.join(_REQUIRED)} and, "
            f"optionally, {', '.join(_OPTIONAL)}."
        )
    for key, value in template.items():
        expected = dict if key in ("headers", "body") else str
        if not isinstance(value, expected):
            raise ValueError(f"{path}: {key!r} must be a {expected.__name__}, got {type(value).__name__}.")
    if "${" in template["url"]:
        raise ValueError(f"{path}: `url` can't hold an environment variable; put it into `headers` or `body`.")
    try:
        url = httpx.URL(template["url"])
    except httpx.InvalidURL as error:
        raise ValueError(f"{path}: `url` is no address ({error}).") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{path}: `url` must begin with http:// or https:// and a host, got {shown(url)!r}.")
    if url.userinfo:
        raise ValueError(f"{path}: `url` holds credentials; put them into `headers` as an environment variable.")
    if "{query}" not in json.dumps(template["body"]):
        raise ValueError(f"{path}: `body` has no {{query}}, so every search would be the same.")
    if not all(isinstance(value, str) for value in template.get("headers", {}).values()):
        raise ValueError(f"{path}: the values of `headers` must be strings.")
    if template.get("method", "POST") not in ("GET", "POST"):
        raise ValueError(f"{path}: `method` is {template['method']!r}; it must be 'GET' or 'POST'.")
    return template


def _map_texts(value: Any, function) -> Any:
    """A JSON value with `function` applied to every text in it."""
    if isinstance(value, dict):
        return {key: _map_texts(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, function) for item in value]
    return function(value) if isinstance(value, str) else value


def _follow(value: Any, path: str) -> Any:
    """What is at a path of keys and positions, such as `"data.0.items"`; `_MISSING` where it ends or holds `null`."""
    for key in path.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
    return _MISSING if value is None else value
