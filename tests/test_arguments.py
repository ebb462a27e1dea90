"""The retriever that the arguments of a run choose, with a server of `mempo serve`."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.http import DIALECTS, HTTPRetriever
from mempo_trl.scripts.arguments import RetrievalArguments, make_search_tool


@pytest.fixture(scope="module")
def mempo_server(tmp_path_factory):
    """`mempo serve`'s application over four passages, and its URL."""
    uvicorn = pytest.importorskip("uvicorn")
    from mempo_trl.retrieval.server import bind, make_app

    retriever = BM25Retriever.from_corpus([Document(f"d{i}", f"Page {i}", f"pet {'cat ' * i}") for i in range(4)])
    app = make_app(retriever, documents=retriever.documents, corpus_hash=retriever.corpus_hash)
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    listener.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield retriever, f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.mark.parametrize("dialect", ["auto", *DIALECTS])
def test_mempo_serve(mempo_server, dialect):
    """Our server gives what the index in process gives, in every dialect, to many threads at once."""
    index, url = mempo_server
    retriever = HTTPRetriever(url, dialect, timeout=60.0, total_timeout=60.0)
    assert retriever.dialect == ("search-r1" if dialect == "auto" else dialect)
    assert retriever.corpus_hash == index.corpus_hash
    queries = ["cat", "page 2", "unknown", "", "pet cat", "\ud800 \"cat\" 'Page 3'"]
    assert retriever.search(queries, 3) == index.search(queries, 3)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: retriever.search([queries[i % 6]], i % 3 + 1), range(48)))
    assert found == [index.search([queries[i % 6]], i % 3 + 1) for i in range(48)]
    assert retriever.counters["retries"] == 0
    retriever.close()


def make_tool(**given):
    arguments = RetrievalArguments(**given)
    return make_search_tool(arguments, None)


def test_search_tool_of_a_server(mempo_server, tmp_path):
    """`search_url` with a cache: the same passages as from the index, and a second run that does not search."""
    index, url = mempo_server
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": d.id, "title": d.title, "text": d.text}) + "\n" for d in index.documents)
    )
    local = make_tool(corpus_path=str(tmp_path / "corpus.jsonl"))
    for searched in (1, 0):
        tool = make_tool(search_url=url, search_dialect="search-r1", search_cache_dir=str(tmp_path / "cache"))
        assert tool("cat") == tool("cat") == local("cat")
        assert tool.retriever.counters["misses"] == searched
        assert tool.retriever.corpus_hash == local.retriever.corpus_hash == index.corpus_hash
        # A server takes a list in one request; BM25 would search it in one thread, query after query.
        assert (tool.max_batch, local.max_batch) == (64, 1)
        tool.retriever.close()


def test_cache_tells_indexes_apart(tmp_path):
    """Two indexes of one corpus with other settings do not share results."""
    documents = [Document("a", "", "cat " * 9 + "dog"), Document("b", "", "cat")]
    for b in (0.0, 1.0):
        BM25Retriever.from_corpus(documents, b=b).save(tmp_path / str(b))
    tools = [
        make_tool(index_path=str(tmp_path / str(b)), search_cache_dir=str(tmp_path / "cache")) for b in (0.0, 1.0)
    ]
    scores = [tool.retriever.search(["cat"], 1)[0][0].score for tool in tools]
    assert scores[0] != scores[1] and all(tool.retriever.counters["misses"] == 1 for tool in tools)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "Give one of `corpus_path`, `index_path`, `search_url` and `web_search`; got none"),
        ({"search_url": "http://a", "web_search": "serper"}, "got search_url='http://a' and web_search='serper'"),
        ({"corpus_path": "a", "search_dialect": "skyrl"}, "`search_dialect` is 'skyrl' but there is no `search_url`"),
        ({"search_url": "http://me:word@host"}, "`search_url` holds a password, which would be saved"),
        ({"search_url": "http://me:${NO_SUCH_VARIABLE}@host"}, "variable NO_SUCH_VARIABLE, which is not set"),
        ({"web_search": "bing"}, "neither 'serper' nor 'tavily' nor a file"),
    ],
)
def test_wrong_place_to_search(given, message):
    """No place, several or a wrong one is an error that names what was given, and no password."""
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_tool(**given)
    assert "word@" not in str(error.value)
