import gzip
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from mempo_trl.retrieval.bm25 import BM25Retriever, split_words
from mempo_trl.retrieval.document import Document, StoredDocuments, corpus_hash, read_corpus, split_contents
from mempo_trl.retrieval.tool import NO_RESULTS, SearchTool
from mempo_trl.tools import ToolError


DATA = Path(__file__).parents[2] / "shared" / "data"

DOCUMENTS = [
    Document("d0", "Franz Kafka", "A writer from Prague, Prague and again Prague."),
    Document("d1", "Prague", "The capital of the Czech Republic."),
    Document("d2", "里德学院", "里德学院位于波特兰。"),
    Document("d3", "Malcolm X", "A minister."),
    Document("d4", "Café Louvre", "A café in Prague that a writer liked."),
    Document("d5", "The", "to be or not to be"),
    Document("d6", "Twin", "the very same words"),
    Document("d7", "Twin", "the very same words"),
]
QUERIES = ["Prague", "里德", "", "writer café", "Prague", "same words"]


def ids(results):
    return [[document.id for document in documents] for documents in results]


@pytest.fixture
def retriever():
    return BM25Retriever.from_corpus(DOCUMENTS)


def test_read_corpus_forms(tmp_path):
    """Both row forms, with other keys and blank lines, give the same documents, as gzip too."""
    rows = [
        {"id": "0", "title": 'The "Big" One', "text": "line\nline", "score": 3},
        {"id": "0", "contents": '"The "Big" One"\nline\nline'},
        {"id": "0", "contents": 'The "Big" One\nline\nline'},
        {"id": "0", "title": 'The "Big" One', "text": "line\nline", "contents": "ignored"},
    ]
    content = "\n\n \n".join(json.dumps(row) for row in rows).encode()
    (tmp_path / "corpus.jsonl").write_bytes(content)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(content))
    expected = [Document("0", 'The "Big" One', "line\nline")] * 4
    assert list(read_corpus(tmp_path / "corpus.jsonl")) == expected
    assert list(read_corpus(str(tmp_path / "corpus.jsonl.gz"))) == expected


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ('"Title"\ntext', ("Title", "text")),
        ('"Title" \r\ntext', ("Title", "text")),
        ('""Heroes" (album)"\nby Bowie', ('"Heroes" (album)', "by Bowie")),  # only the outer quotes go
        ("Title\ntext\nmore", ("Title", "text\nmore")),
        ('"\ntext', ('"', "text")),
        ('""\n', ("", "")),
    ],
)
def test_split_contents(contents, expected):
    """The first line is the title, less one pair of double quotes."""
    assert split_contents(contents) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "1", "title": "t"', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'["1", "t", "x"]', "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"title": "t", "text": "x"}', 'the key "id" is missing'),
        (b'{"id": "1", "text": "x"}', 'the key "title" is missing'),
        (b'{"id": "1", "title": "t"}', 'the key "text" is missing'),
        (b'{"contents": "t\\nx"}', 'the key "id" is missing'),
        (b'{"id": 1, "title": "t", "text": "x"}', '"id" must be a string, got int'),
        (b'{"id": "1", "title": null, "text": "x"}', '"title" must be a string, got NoneType'),
        (b'{"id": "1", "title": "t", "text": ["x"]}', '"text" must be a string, got list'),
        (b'{"id": "1", "contents": 5}', '"contents" must be a string, got int'),
        (b'{"id": "1", "contents": "no newline"}', "no newline between title and text: 'no newline'"),
        (b'{"id": "1", "title": "caf\xe9", "text": "x"}', "not valid UTF-8"),
        (b'{"id": "1", "title": "t", "text": "\\ud800"}', '"text" holds half of a surrogate pair'),
    ],
)
def test_bad_line(tmp_path, line, problem):
    """A line that cannot be read is named by file and number, with what is wrong and what to write instead."""
    path = tmp_path / "corpus.jsonl"
    good = b'{"id": "0", "title": "t", "text": "x"}\n'
    path.write_bytes(good + b"\n" + good + line + b"\n" + good)
    with pytest.raises(ValueError) as error:
        list(read_corpus(path))
    message = str(error.value)
    assert message.startswith(f"{path}, line 4: ") and problem in message and "Write one JSON object a line" in message


def test_no_corpus(tmp_path):
    """A missing file and a folder are named at once; a file without passages is refused."""
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match="no corpus file at .*give the path of a JSONL file"):
            read_corpus(path)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.jsonl holds no passage"):
        BM25Retriever.from_corpus(tmp_path / "empty.jsonl")


def test_corpus_hash():
    """The hash does not depend on scores, and depends on order and on where one field ends."""
    a, b = Document("1", "ab", "c"), Document("1", "a", "bc")
    assert corpus_hash([a]) == corpus_hash(iter([Document("1", "ab", "c", score=2.0)]))
    assert len({corpus_hash(documents) for documents in ([a], [b], [a, b], [b, a])}) == 4
    # sha256sum of the line {"id": "1", "title": "é", "text": "c"}: the hash must not change between versions.
    assert corpus_hash([Document("1", "é", "c")]) == "eb391c6d2da4e772a86e385a37db498a40912a60f76583f3f5016a3672a86c72"


def test_stored_documents(tmp_path):
    """Stored passages are a sequence equal to the list that was written."""
    documents = DOCUMENTS + [Document("n", "new\nline\u2028", '"\\ \x00')]
    StoredDocuments.write(tmp_path / "documents.jsonl", documents)
    stored = StoredDocuments(tmp_path / "documents.jsonl")
    assert list(stored) == documents and len(stored) == len(documents)
    assert stored[-1] == documents[-1] and stored[2] == documents[2]
    with pytest.raises(IndexError):
        stored[len(documents)]


def reference_bm25(query, documents, k1, b):
    """BM25 as bm25s's default method "lucene" defines it: without the constant factor k1 + 1 of the first papers."""
    passages = [split_words(f"{document.title} {document.text}") for document in documents]
    average = sum(map(len, passages)) / len(passages)
    scores = []
    for words in passages:
        score = 0.0
        for word in split_words(query):
            frequency, containing = words.count(word), sum(word in other for other in passages)
            idf = math.log(1 + (len(passages) - containing + 0.5) / (containing + 0.5))
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(words) / average))
        scores.append(score)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (2.0, 0.0)])
@pytest.mark.parametrize(
    "query", ["Prague", "writer from Prague", "Prague Prague café unknown", "里德", "the same words"]
)
def test_scores(query, k1, b):
    """Scores and ranking are those of the ten-line reference, and passages that score 0 are left out."""
    expected = {
        document.id: score
        for document, score in zip(DOCUMENTS, reference_bm25(query, DOCUMENTS, k1, b), strict=True)
        if score
    }
    found = BM25Retriever.from_corpus(DOCUMENTS, k1=k1, b=b).search([query], top_k=100)[0]
    assert {document.id: document.score for document in found} == pytest.approx(expected, rel=1e-5)
    assert [document.id for document in found] == sorted(expected, key=lambda id: -expected[id])


def test_words():
    """Words are lower-cased and lose stop words; one letter is a word, and so is one Chinese character."""
    assert split_words("The U.S. of Malcolm X, 0 cafés!") == ["u", "s", "malcolm", "x", "0", "cafés"]
    assert split_words("里德学院 (Reed) きの カタカナ 한국어") == [
        *"里德学院",
        "reed",
        "き",
        "の",
        "カタカナ",
        "한국어",
    ]
    assert split_words("to be or not to be — the!") == []


@pytest.mark.parametrize("query", ["", " ", "the of and", "?!", "absent", "\x00", "\ud800"])
def test_nothing_found(retriever, query):
    """A query without any indexed word finds nothing and does not fail."""
    assert retriever.search([query], top_k=3) == [[]]


@pytest.mark.parametrize(("query", "first"), [("德", "d2"), ("里德学院", "d2"), ("MALCOLM X", "d3"), ("CAFÉ", "d4")])
def test_unicode_queries(retriever, query, first):
    """Names in any script and case are found, and a part of a Chinese name too."""
    assert retriever.search([query], top_k=1)[0][0].id == first


def test_top_k(retriever):
    """`top_k` bounds the passages per query, may exceed the corpus and must be positive; queries come in a list."""
    assert [len(retriever.search(["Prague"], top_k)[0]) for top_k in (1, 2, 3, 1000)] == [1, 2, 3, 3]
    for top_k in (0, -1):
        with pytest.raises(ValueError, match=f"got top_k={top_k}"):
            retriever.search(["Prague"], top_k)
    with pytest.raises(TypeError, match=r"pass \[query\]"):
        retriever.search("Prague", top_k=3)


def test_ties_keep_the_order_of_the_corpus():
    """Of passages with equal scores the earlier one comes first, also where `top_k` cuts between them."""
    twins = [Document(str(i), "title", "same") for i in range(200)] + [Document("best", "title", "same same")]
    retriever = BM25Retriever.from_corpus(twins)
    for top_k in (1, 2, 7, 150, 300):
        assert ids(retriever.search(["same"], top_k)) == [(["best"] + [str(i) for i in range(200)])[:top_k]]


def test_batch_equals_single(retriever):
    """Searching queries together gives what each gives alone, scores included."""
    assert retriever.search(QUERIES, top_k=2) == [retriever.search([query], top_k=2)[0] for query in QUERIES]
    assert retriever.search([], top_k=2) == []


@pytest.mark.parametrize("settings", [{"k1": -0.1}, {"b": 1.1}, {"b": -0.1}, {"k1": math.nan}])
def test_impossible_settings(settings):
    """Settings outside the range of the formula are refused with their values."""
    with pytest.raises(ValueError, match="expected k1 >= 0 and 0 <= b <= 1"):
        BM25Retriever.from_corpus(DOCUMENTS, **settings)


@pytest.mark.parametrize("documents", [[], [Document("1", "The", "to be"), Document("2", "", "")]])
def test_corpus_without_words(documents):
    """A corpus in which nothing could ever be found is refused."""
    with pytest.raises(ValueError, match=f"got {len(documents)} passages without a single word"):
        BM25Retriever.from_corpus(documents)


TITLE_WORDS = ["Malcolm", "x", "里", "学院", "Café", "naïve", "U.S.", "42", "Øre", "Здравствуй", "ひ", "Zürich"]


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.frozensets(st.sampled_from(TITLE_WORDS), min_size=3, max_size=3), min_size=2, max_size=20), st.data()
)
def test_unique_title_is_found_first(titles, data):
    """A passage that alone has the query as its title comes first, in any script, among passages of equal length."""
    documents = [Document(str(i), " ".join(sorted(title)), "one and the same text") for i, title in enumerate(titles)]
    wanted = data.draw(st.sampled_from(documents))
    # Titles of different numbers of words would make lengths differ, which BM25 takes into account.
    retriever = BM25Retriever.from_corpus(documents, b=0.0)
    assert retriever.search([wanted.title], top_k=1)[0][0].id == wanted.id


@pytest.mark.parametrize("mmap", [True, False])
def test_save_and_load(tmp_path, retriever, mmap):
    """A loaded index gives equal results, and saving it again equal files, without any pickle."""
    retriever.save(tmp_path / "a" / "b")
    loaded = BM25Retriever.load(tmp_path / "a" / "b", mmap=mmap)
    assert loaded.search(QUERIES, top_k=5) == retriever.search(QUERIES, top_k=5)
    assert list(loaded.documents) == DOCUMENTS and len(loaded) == len(DOCUMENTS)
    assert loaded.corpus_hash == corpus_hash(DOCUMENTS)
    loaded.save(tmp_path / "again")
    files = {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert all(name.endswith((".npy", ".json", ".jsonl")) for name in files)


def test_files_of_an_index(tmp_path, retriever):
    """The manifest states hash, count and settings; loading reads neither scores nor passages into memory."""
    retriever.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["corpus_hash"] == corpus_hash(DOCUMENTS) and manifest["num_documents"] == len(DOCUMENTS)
    assert manifest["settings"] == {"method": "lucene", "k1": 0.9, "b": 0.4}
    loaded = BM25Retriever.load(tmp_path)
    assert isinstance(loaded.documents, StoredDocuments)
    assert all(isinstance(loaded._index.scores[name], np.memmap) for name in ("data", "indices", "indptr"))


def test_save_over_a_loaded_index(tmp_path, retriever):
    """Replacing an index leaves those who have it memory-mapped undisturbed, the replaced index itself included."""
    retriever.save(tmp_path)
    loaded = BM25Retriever.load(tmp_path)
    before = loaded.search(QUERIES, top_k=5)
    BM25Retriever.from_corpus([Document("new", "Prague", "other")] * 50).save(tmp_path)
    assert loaded.search(QUERIES, top_k=5) == before
    loaded.save(tmp_path)
    assert BM25Retriever.load(tmp_path).search(QUERIES, top_k=5) == before


@pytest.mark.parametrize("fails_at", range(9))
def test_interrupted_save(tmp_path, retriever, monkeypatch, fails_at):
    """A save that stops halfway leaves either the old index or none, never a mixture."""
    BM25Retriever.from_corpus(DOCUMENTS[:2]).save(tmp_path)
    moves = iter(range(100))
    replace = os.replace

    def replace_or_fail(source, target):
        if next(moves) == fails_at:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_or_fail)
    try:
        retriever.save(tmp_path)
    except OSError:
        with pytest.raises(FileNotFoundError, match="no finished BM25 index"):
            BM25Retriever.load(tmp_path)
        assert not list(tmp_path.glob(".saving-*"))
    else:
        assert fails_at == 8  # seven files and the manifest: nothing was left to fail
        assert len(BM25Retriever.load(tmp_path)) == len(DOCUMENTS)


def test_save_that_cannot_write(tmp_path, retriever, monkeypatch):
    """A save that fails before all files are written leaves the old index in place."""
    BM25Retriever.from_corpus(DOCUMENTS[:2]).save(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())

    def fail(path, documents):
        raise OSError("disk full")

    monkeypatch.setattr(StoredDocuments, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        retriever.save(tmp_path)
    assert len(BM25Retriever.load(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def edit_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "documents.jsonl").write_bytes(b"{}"),
            r"documents.jsonl has 2 bytes, manifest.json says",
        ),
        (lambda folder: (folder / "vocab.index.json").unlink(), "vocab.index.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not the manifest of a BM25 index"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not the manifest of a BM25 index"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "is not the manifest of a BM25 index"),
        (
            lambda folder: edit_manifest(folder, format="other/7"),
            "has the format 'other/7', expected 'mempo_trl.bm25/1'",
        ),
    ],
)
def test_damaged_index(tmp_path, retriever, damage, message):
    """Files that are not those of the manifest are named, with the remedy."""
    retriever.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message + ".* build the index again"):
        BM25Retriever.load(tmp_path)


def test_changed_passages(tmp_path, retriever):
    """Passages that were edited to the same length are noticed when everything is read."""
    retriever.save(tmp_path)
    path = tmp_path / "documents.jsonl"
    path.write_bytes(path.read_bytes().replace(b"Kafka", b"Kufka"))
    with pytest.raises(ValueError, match="are not those that were indexed"):
        BM25Retriever.load(tmp_path, mmap=False)


def test_no_index(tmp_path):
    """A folder without an index, and a folder that is not there, are named."""
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match=f"no finished BM25 index in '{folder}'"):
            BM25Retriever.load(folder)


def test_concurrent_searches(tmp_path, retriever):
    """Threads that search at once get what one thread gets."""
    retriever.save(tmp_path)
    loaded = BM25Retriever.load(tmp_path)
    expected = retriever.search(QUERIES, top_k=3)
    start = threading.Barrier(8)

    def search(_):
        start.wait()
        return [loaded.search(QUERIES, top_k=3) for _ in range(20)]

    with ThreadPoolExecutor(max_workers=8) as pool:
        for results in pool.map(search, range(8)):
            assert results == [expected] * 20


class FakeRetriever:
    def __init__(self, documents):
        self.documents = documents
        self.calls = []

    def search(self, queries, top_k):
        self.calls.append((queries, top_k))
        return [self.documents[:top_k] for _ in queries]


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token per byte, so that a character of another script spans several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_tool_renders_passages():
    """Each passage is a block with its number and title, in the order of the retriever."""
    retriever = FakeRetriever([Document("1", "A", "first\nline"), Document("2", "B", ""), Document("3", "C", "third")])
    tool = SearchTool(retriever, top_k=2)
    assert tool(query="q") == "Doc 1(Title: A) first\nline\nDoc 2(Title: B) "
    assert tool.search("q") == retriever.documents[:2]
    assert retriever.calls == [(["q"], 2)] * 2


def test_tool_finds_nothing(retriever):
    """Nothing found is a sentence of its own, and a search that fails raises."""
    assert SearchTool(retriever)("absent") == NO_RESULTS == "No results found for this query."
    assert SearchTool(retriever).search("absent") == []

    class Broken:
        def search(self, queries, top_k):
            raise TimeoutError("no answer in 10 s")

    with pytest.raises(TimeoutError, match="no answer"):
        SearchTool(Broken())("q")


@pytest.mark.parametrize("count", [0, 2])
def test_tool_refuses_a_wrong_number_of_results(count):
    """Passages that may belong to another query are not shown as found for this one."""

    class Wrong:
        def search(self, queries, top_k):
            return [[Document("1", "A", "text")]] * count

    with pytest.raises(ToolError, match=f"Wrong gave {count} lists of passages for 1 query"):
        SearchTool(Wrong())("q")


def test_tool_cuts_a_query():
    """A model that writes without end gets a search, not a refusal, which would count as a failure of the tool."""
    retriever = FakeRetriever([])
    assert SearchTool(retriever)("x" * 100_000) == NO_RESULTS
    assert retriever.calls == [(["x" * 8192], 3)]


def test_tool_schema(retriever):
    """transformers makes the tool's schema from its call, and the model sees one required string."""
    tool = SearchTool(retriever)
    function = get_json_schema(tool.__call__)["function"]
    assert tool.name == "search"
    assert function["description"] == "Searches the corpus and returns the passages that match best."
    assert function["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "The search query."}},
        "required": ["query"],
    }


@pytest.mark.parametrize(
    ("text", "max_passage_tokens", "expected"),
    [
        ("abc def", 7, "abc def"),  # exactly as long as the budget
        ("abc def", 6, "abc de"),
        ("abc def", 4, "abc"),  # the space at the cut goes
        ("a里b", 4, "a里"),  # 里 is three bytes
        ("a里b", 3, "a"),  # never half a character
        ("里b", 2, ""),
        ("", 1, ""),
    ],
)
def test_tool_cuts_passages(byte_tokenizer, text, max_passage_tokens, expected):
    """The text of each passage, not its title, is cut to the budget, at a whole character."""
    documents = [Document("1", "A long title", text), Document("2", "B", text)]
    tool = SearchTool(FakeRetriever(documents), max_passage_tokens=max_passage_tokens, tokenizer=byte_tokenizer)
    assert tool("q") == f"Doc 1(Title: A long title) {expected}\nDoc 2(Title: B) {expected}"


@settings(deadline=None)
@given(text=st.text(max_size=20), budget=st.integers(1, 20))
def test_cut_passage_fits(byte_tokenizer, text, budget):
    """A cut passage is a beginning of the passage and has at most the tokens of the budget."""
    tool = SearchTool(FakeRetriever([]), max_passage_tokens=budget, tokenizer=byte_tokenizer)
    cut = tool._cut(text)
    assert text.startswith(cut)
    assert len(byte_tokenizer(cut, add_special_tokens=False)["input_ids"]) <= budget


def test_tool_refuses(byte_tokenizer):
    """Impossible settings fail when the tool is built, not in training."""
    with pytest.raises(ValueError, match="got top_k=0"):
        SearchTool(FakeRetriever([]), top_k=0)
    with pytest.raises(ValueError, match="got max_passage_tokens=0"):
        SearchTool(FakeRetriever([]), max_passage_tokens=0, tokenizer=byte_tokenizer)
    with pytest.raises(ValueError, match="got max_passage_tokens=5 but no `tokenizer`"):
        SearchTool(FakeRetriever([]), max_passage_tokens=5)

    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="SlowTokenizer does not tell where its tokens are"):
        SearchTool(FakeRetriever([]), max_passage_tokens=5, tokenizer=SlowTokenizer())


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the Wikipedia passages in ../shared/data")
def test_wikipedia_titles():
    """With the gold titles of 50 questions as queries, at least 90% are in the top 3 of 12,000 passages."""
    retriever = BM25Retriever.from_corpus(DATA / "corpus.jsonl")
    assert len(retriever) == 12_000
    questions = [json.loads(line) for line in (DATA / "dev.jsonl").read_text(encoding="utf-8").splitlines()[:50]]
    titles = [title for question in questions for title in question["supporting_titles"]]
    found = retriever.search(titles, top_k=3)
    hits = sum(
        title in [document.title for document in documents] for title, documents in zip(titles, found, strict=True)
    )
    assert hits >= 0.9 * len(titles)
