import copy
import json
import logging
import re
from pathlib import Path

import pytest
from stub_search_servers import WebServer

from mempo_trl.retrieval import web
from mempo_trl.retrieval.cache import CachedRetriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.retrieval.web import WebRetriever
from mempo_trl.tools import NO_RESULTS, ToolError


QUICK = dict(timeout=10.0, retries=2, backoff=0.001, max_backoff=0.01)
KEY = "sk-4711/secret+key"
SERPER = {
    "searchParameters": {"q": "a", "type": "search", "engine": "google"},
    "organic": [
        {"title": "First", "link": "https://one.example", "snippet": "About one.", "position": 1},
        {"title": "Second", "link": "https://two.example", "position": 2},
        {"title": "Third", "link": "https://three.example", "snippet": "About three.", "position": 3},
    ],
    "credits": 1,
}
TAVILY = {
    "query": "a",
    "answer": None,
    "results": [{"title": "First", "url": "https://one.example", "content": "About one.", "score": 0.9}],
}
ANSWERS = {"serper": SERPER, "tavily": TAVILY}
TEMPLATE = {
    "url": "http://localhost:1/find?engine=x",
    "method": "GET",
    "headers": {"X-Client": "mempo"},
    "body": {"q": "say: {query}", "key": "${ENGINE_KEY}", "count": "{top_k}", "safe": True},
    "results": "web.0.hits",
    "title": "meta.name",
    "text": "body",
    "id": "meta.id",
}


@pytest.fixture
def connect(monkeypatch, tmp_path):
    """Makes retrievers that ask a stub instead of the engine, and closes them."""
    for name in ("SERPER_API_KEY", "TAVILY_API_KEY", "ENGINE_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setattr(web, "TEMPLATES", copy.deepcopy(web.TEMPLATES))
    made = []

    def connect(server, template="serper", **settings):
        if isinstance(template, dict):
            path = tmp_path / "template.json"
            path.write_text(json.dumps({**template, "url": template["url"].replace("http://localhost:1", server.url)}))
            template = path
        else:
            web.TEMPLATES[template]["url"] = server.url + "/search"
        made.append(WebRetriever(template, **{**QUICK, **settings}))
        return made[-1]

    yield connect
    for retriever in made:
        retriever.close()


def test_serper(connect):
    """Serper is asked in its form and its organic results are the passages, a missing snippet being empty."""
    with WebServer((200, SERPER)) as server:
        assert connect(server).search(['里德 "a"', " "], 2) == [
            [
                Document("https://one.example", "First", "About one."),
                Document("https://two.example", "Second", ""),
            ],
            [],
        ]
        [(method, path, body, headers)] = server.requests
    assert (method, path, body) == ("POST", "/search", {"q": '里德 "a"', "num": 2})
    assert headers["X-API-KEY"] == KEY


def test_tavily(connect):
    """Tavily is asked in its form, with its key as a bearer token."""
    with WebServer((200, TAVILY)) as server:
        found = connect(server, "tavily").search(["a"], 2)
        [(method, path, body, headers)] = server.requests
    assert found == [[Document("https://one.example", "First", "About one.")]]
    assert (method, path, body) == ("POST", "/search", {"query": "a", "max_results": 2})
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_template(connect):
    """A template says method, headers, body and where in the answer things are; placeholders of a query stay as text."""
    hits = [{"meta": {"name": "T", "id": 7}, "body": "x"}, {"meta": {"name": None}, "body": "y\ud800"}]
    with WebServer((200, {"web": [{"hits": hits}]})) as server:
        found = connect(server, TEMPLATE).search(["{top_k} ${ENGINE_KEY}"], 2)
        [(method, path, body, headers)] = server.requests
    assert found == [[Document("7", "T", "x"), Document("", "", "y?")]]
    assert method == "GET" and body is None and headers["X-Client"] == "mempo"
    assert path == (
        "/find?engine=x&q=say%3A+%7Btop_k%7D+%24%7BENGINE_KEY%7D&key=sk-4711%2Fsecret%2Bkey&count=2&safe=true"
    )


def test_several_queries(connect):
    """Each query gets its own answer; equal ones are asked once."""
    with WebServer((200, SERPER)) as server:
        server.answers = [(200, {**SERPER, "organic": [{"title": "only"}]})]
        found = connect(server).search(["a", "b", "a"], 2)
        assert sorted(request[2]["q"] for request in server.requests) == ["a", "b"]
    assert found == [[Document("", "only", "")]] * 3


@pytest.mark.parametrize(
    "answer", [{**SERPER, "organic": []}, {"searchParameters": {"q": "a"}, "credits": 1}, {**SERPER, "organic": None}]
)
def test_nothing_found(connect, answer):
    """Serper found nothing where it repeats the query and gives no results."""
    with WebServer((200, answer)) as server:
        assert SearchTool(connect(server))("a") == NO_RESULTS


@pytest.mark.parametrize(
    "status, answer, attempts",
    [
        (400, {"message": "Not enough credits", "statusCode": 400}, 1),
        (200, {"message": "Not enough credits", "statusCode": 400}, 3),
        (402, {"error": "payment required"}, 1),
        (403, {"message": "Unauthorized."}, 1),
        (432, {"detail": {"error": "This request exceeds your plan's set usage limit."}}, 1),
        (429, {"message": "too many requests"}, 3),
        (500, b"", 3),
        (200, b"", 3),
        (200, b"<html>captcha</html>", 3),
        (200, [], 3),
        (200, {**SERPER, "organic": {}}, 3),
        (200, {**SERPER, "organic": ["a"]}, 3),
        (200, {**SERPER, "organic": [{"title": ["a"]}]}, 3),
    ],
)
def test_no_answer_is_an_error(connect, tmp_path, status, answer, attempts):
    """A quota that is used up, a refusal and nonsense are errors, are not cached, and never an empty result."""
    with WebServer((status, answer), (status, answer), (status, answer), (200, SERPER)) as server:
        retriever = CachedRetriever(connect(server), tmp_path / "cache", "serper")
        with pytest.raises(ToolError, match=f"{server.url}/search failed after {attempts} attempt") as error:
            retriever.search(["a"], 2)
        assert len(server.requests) == attempts
        server.answers = [(200, SERPER)]
        assert len(retriever.search(["a"], 2)[0]) == 2
    if isinstance(answer, dict) and "message" in answer:
        assert answer["message"] in str(error.value)


def test_key_stays_secret(connect, caplog, tmp_path):
    """The key reaches the engine, but no log, repr, error or cache, not even when the engine repeats it."""
    caplog.set_level(logging.DEBUG)
    echo = {"message": f"the key {KEY} is not known", "quoted": "sk-4711%2Fsecret%2Bkey"}
    texts = []
    for template in ("serper", "tavily", TEMPLATE):
        with WebServer((403, echo)) as server:
            retriever = connect(server, template)
            for setting in ("refused", "broken", "gone"):
                if setting == "broken":
                    server.answers = [(200, {"message": KEY * 30})]
                if setting == "gone":
                    server.__exit__()
                with pytest.raises(ToolError) as error:
                    retriever.search(["a"], 2)
                assert error.value.__cause__ is error.value.__context__ is None
                texts.append(str(error.value))
            texts += [repr(retriever), retriever.url, retriever.name, str(retriever.template)]
    with WebServer((200, SERPER)) as server:
        cached = CachedRetriever(connect(server), tmp_path / "cache", "serper")
        cached.search(["a"], 2)
        cached.close()
    texts += [path.read_bytes().decode("latin-1") for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    texts.append(caplog.text)
    assert "HTTP Request: " in caplog.text and "the key *** is not known" in texts[0]
    for secret in (KEY, "sk-4711", "secret%2Bkey"):
        assert not any(secret in text for text in texts), secret


@pytest.mark.parametrize("name", ["serper", "tavily"])
@pytest.mark.parametrize("value", [None, "", " \n"])
def test_missing_key(name, value, monkeypatch):
    """A key that is not there is named when the retriever is made."""
    variable = f"{name.upper()}_API_KEY"
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"the web search '{name}' needs the environment variable {variable}"):
        WebRetriever(name)


def test_unusable_key(connect, monkeypatch):
    """White space around a key is dropped; a key that no header can carry is refused without being shown."""
    monkeypatch.setenv("SERPER_API_KEY", f" {KEY}\r\n")
    with WebServer((200, SERPER)) as server:
        connect(server).search(["a"], 1)
        assert server.requests[0][3]["X-API-KEY"] == KEY
        monkeypatch.setenv("SERPER_API_KEY", "sk\n4711")
        with pytest.raises(ValueError, match="SERPER_API_KEY holds characters that no header can carry") as error:
            connect(server)
    assert "4711" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"results": None}, "lacks the keys .'results'. and has the unknown keys .."),
        ({"resulst": "x"}, "unknown keys .'resulst'."),
        ({"body": "{query}"}, "'body' must be a dict, got str"),
        ({"body": {"q": "query"}}, "`body` has no {query}"),
        ({"headers": {"X": 1}}, "the values of `headers` must be strings"),
        ({"method": "PUT"}, "`method` is 'PUT'; it must be 'GET' or 'POST'"),
        ({"url": "api.example.com"}, "must begin with http:// or https://"),
        ({"url": "http://[::1"}, "`url` is no address"),
        ({"url": "http://h/?key=${ENGINE_KEY}"}, "`url` can't hold an environment variable"),
        ({"url": "http://me:password@h/"}, "`url` holds credentials; put them into `headers`"),
    ],
)
def test_wrong_template(tmp_path, change, message):
    """What is wrong with a template is named, before anything is sent."""
    template = {key: value for key, value in {**TEMPLATE, **change}.items() if value is not None}
    (tmp_path / "engine.json").write_text(json.dumps(template))
    with pytest.raises(ValueError, match=message):
        WebRetriever(tmp_path / "engine.json")


@pytest.mark.parametrize("content, message", [("{", "is not JSON"), ("[]", "must be a JSON object, got list")])
def test_broken_template(tmp_path, content, message):
    """A template that is no JSON object is refused."""
    (tmp_path / "engine.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        WebRetriever(tmp_path / "engine.json")


def test_template_in_the_docs(connect, monkeypatch):
    """The example in docs/retrieval.md is a template that works, and finds nothing where the engine says so."""
    docs = Path(__file__).parents[1] / "docs" / "retrieval.md"
    blocks = re.findall(r"```json\n(.*?)```", docs.read_text(encoding="utf-8"), re.DOTALL)
    [template] = [json.loads(block) for block in blocks if "{query}" in block]
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    answer = {"query": {"original": "a"}, "web": {"results": [{"title": "T", "description": "x", "url": "u"}]}}
    with WebServer((200, answer), (200, {"query": {"original": "a"}}), (200, {"type": "error"})) as server:
        retriever = connect(server, {**template, "url": "http://localhost:1/search"}, retries=0)
        assert retriever.search(["a"], 2) == [[Document("u", "T", "x")]]
        assert retriever.search(["a"], 2) == [[]]
        with pytest.raises(ToolError, match="there are no results at"):
            retriever.search(["a"], 2)


def test_unknown_engine():
    """The engines that are known are named."""
    with pytest.raises(ValueError, match="'google', which is neither 'serper' nor 'tavily' nor a file"):
        WebRetriever("google")
