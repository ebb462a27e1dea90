"""Building indexes on disk: interrupted at any point, resumed, changed, refused; and loading any of them."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from filelock import FileLock
from index_builds import FakeEncoder, files_of, make_documents, write_corpus

from mempo_trl import cli
from mempo_trl.retrieval import dense, index
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.dense import DenseRetriever
from mempo_trl.retrieval.document import StoredDocuments, corpus_hash, read_corpus
from mempo_trl.retrieval.hybrid import HybridRetriever
from mempo_trl.retrieval.index import build_index, load_index


DOCUMENTS = make_documents(20)
CLASSES = {"bm25": BM25Retriever, "dense": DenseRetriever, "hybrid": HybridRetriever}


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)


class StoppedEncoder(FakeEncoder):
    """Is interrupted when it has encoded so many shards."""

    def __init__(self, shards, **settings):
        super().__init__(**settings)
        self.shards = shards

    def encode_passages(self, documents):
        if self.shards == 0:
            raise KeyboardInterrupt
        self.shards -= 1
        return super().encode_passages(documents)


def build(corpus, folder, encoder=None, kind="dense", **options):
    encoder = encoder or FakeEncoder()
    build_index(corpus, folder, kind, encoder=encoder, **{"shard_size": 4, **options})
    return encoder


def interrupt(corpus, folder, shards=3, **options):
    """A build of 20 passages that stops after so many of its 5 shards."""
    with pytest.raises(KeyboardInterrupt):
        build(corpus, folder, StoppedEncoder(shards), **options)


def lines(caplog):
    """What the package logged; bm25s logs too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("mempo_trl")]


# Interruptions.


def run_killed_builds(folder, builds, seed, by, max_kills):
    command = [sys.executable, str(REPOSITORY / "tests" / "index_builds.py"), str(folder)]
    command += [str(builds), str(seed), by, str(max_kills)]
    # One thread: with more, the graph of an HNSW index depends on which of them is faster.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_killed_builds(tmp_path):
    """
    Ten builds of all kinds, each killed (SIGKILL) at one or two random lines and started again: none loads as complete
    before it is, and every one ends in the files of a build in one go.
    """
    assert run_killed_builds(tmp_path, builds=10, seed=0, by="lines", max_kills=2)["kills"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "by"), [(1, "lines"), (2, "lines"), (3, "time")])
def test_killed_builds_many(tmp_path, seed, by):
    """As above, at any moment and again and again until a build survives."""
    assert run_killed_builds(tmp_path, builds=10, seed=seed, by=by, max_kills=15)["kills"] >= 10


def test_goes_on_where_it_stopped(tmp_path, corpus, caplog):
    """A resumed build encodes only what is missing, says so, and ends in the files of a build in one go."""
    build(corpus, tmp_path / "whole")
    interrupt(corpus, tmp_path / "index")
    with pytest.raises(FileNotFoundError, match="no finished index in .* run the same `mempo index` again to go on"):
        load_index(tmp_path / "index")
    with caplog.at_level(logging.INFO, "mempo_trl"):
        encoder = build(corpus, tmp_path / "index")
    # The first passage is encoded again to see that the encoder is still the same, in the build and at load.
    assert encoder.passages == ["d0", *(f"d{i}" for i in range(12, 20))]
    assert lines(caplog) == ["3 of 5 shards of vectors are there."]
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")
    assert not (tmp_path / "index" / ".building").exists()


def test_what_keeps_the_shards(tmp_path, corpus):
    """Another FAISS index or query prompt, which the passages' vectors do not depend on, keeps the shards."""
    interrupt(corpus, tmp_path / "index")
    encoder = build(corpus, tmp_path / "index", FakeEncoder(query_prompt="other: "), faiss="hnsw")
    assert len(encoder.passages) == 1 + 8
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["settings"]["query_prompt"] == "other: " and manifest["settings"]["faiss"] == "hnsw"


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("corpus or settings", {"encoder": FakeEncoder(passage_prompt="other: ")}),
        ("corpus or settings", {"encoder": FakeEncoder(name="other")}),
        ("corpus or settings", {"shard_size": 5}),
        ("corpus or settings", {"corpus": make_documents(20, "changed")}),
        ("encoder", {"encoder": FakeEncoder(dimension=8)}),
    ],
)
def test_what_starts_anew(tmp_path, corpus, caplog, changed, options):
    """Other passages, other settings or another model under the same name: no old vector stays, and one line says so."""
    interrupt(corpus, tmp_path / "index")
    if "corpus" in options:
        options = {"corpus": write_corpus(corpus, options["corpus"])}
    options = {"corpus": corpus, "encoder": FakeEncoder(), "shard_size": 4, **options}
    options["encoder"].passages.clear()
    build(folder=tmp_path / "index", **options)
    assert set(options["encoder"].passages) == {f"d{i}" for i in range(20)}
    assert lines(caplog) == [
        f"The {changed} changed since the build in {tmp_path / 'index' / '.building'} was interrupted: it starts anew."
    ]
    build(folder=tmp_path / "whole", **options)
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, np.zeros((3, 16), np.float16)),
        lambda path: np.save(path, np.zeros((4, 16), np.float32)),
    ],
)
def test_damaged_shard(tmp_path, corpus, caplog, damage):
    """A shard that is cut off, empty or of another form is named and encoded again."""
    build(corpus, tmp_path / "whole")
    interrupt(corpus, tmp_path / "index")
    shard = tmp_path / "index" / ".building" / "embeddings-0000000004.npy"
    damage(shard)
    encoder = build(corpus, tmp_path / "index")
    assert encoder.passages[1:] == [f"d{i}" for i in (4, 5, 6, 7, *range(12, 20))]
    assert lines(caplog)[0] == f"{shard} is damaged: its passages are encoded again."
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")


def test_damaged_first_shard(tmp_path, corpus):
    """The first shard, which tells whether the encoder is the same, may itself be damaged."""
    interrupt(corpus, tmp_path / "index")
    (tmp_path / "index" / ".building" / "embeddings-0000000000.npy").write_bytes(b"")
    assert build(corpus, tmp_path / "index").passages == [f"d{i}" for i in (0, 1, 2, 3, *range(12, 20))]


# Complete indexes.


@pytest.mark.parametrize("kind", CLASSES)
def test_complete_index(tmp_path, corpus, kind):
    """The manifest states hash, count and settings; the index loads as its kind, and built again it stays as it is."""
    encoder = FakeEncoder()
    manifest = build_index(corpus, tmp_path / "index", kind, encoder=encoder)
    assert manifest["corpus_hash"] == corpus_hash(DOCUMENTS) and manifest["num_documents"] == 20
    loaded = load_index(tmp_path / "index", encoder)
    assert type(loaded) is CLASSES[kind] and loaded.corpus_hash == corpus_hash(DOCUMENTS)
    assert loaded.search(["Title 3\nabout number 3"], top_k=1)[0][0].id == "d3"
    files = files_of(tmp_path / "index")
    inodes = {path: path.stat().st_ino for path in (tmp_path / "index").rglob("*.jsonl")}
    encoder.passages.clear()
    assert build_index(corpus, tmp_path / "index", kind, encoder=encoder) == manifest
    assert encoder.passages == [] and files_of(tmp_path / "index") == files
    assert inodes == {path: path.stat().st_ino for path in (tmp_path / "index").rglob("*.jsonl")}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("change", ["settings", "passages"])
def test_replaced_index(tmp_path, corpus, caplog, kind, change):
    """Another corpus or other settings build the index anew, and one line for each part says why."""
    build(corpus, tmp_path / "index", kind=kind)
    old = load_index(tmp_path / "index", FakeEncoder())
    options = {"k1": 1.5, "faiss": "ivf"} if change == "settings" else {}
    documents = make_documents(20, "changed") if change == "passages" else DOCUMENTS
    write_corpus(corpus, documents)
    build(corpus, tmp_path / "index", kind=kind, **options)
    parts = [tmp_path / "index" / part for part in (("bm25", "dense") if kind == "hybrid" else ("",))]
    assert lines(caplog) == [f"The index in {part} has other {change}: it is built anew." for part in parts]
    build(corpus, tmp_path / "whole", kind=kind, **options)
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")
    assert old.search(["Title 3\nabout number 3"], top_k=1)[0][0].text == "about number 3"  # what is loaded stays


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_old_index_stays_until_the_new_one_is_complete(tmp_path, corpus, monkeypatch, kind):
    """While an index is built anew, the old one can still be loaded."""
    build(corpus, tmp_path / "index", kind=kind)
    write_corpus(corpus, make_documents(20, "changed"))

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(StoredDocuments, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", kind=kind)
    assert load_index(tmp_path / "index", FakeEncoder()).corpus_hash == corpus_hash(DOCUMENTS)


@pytest.mark.parametrize("kind", CLASSES)
def test_interrupted_finish(tmp_path, corpus, monkeypatch, kind):
    """
    A build over an old index of files of equal sizes, stopped before any of the moves that finish it: what then loads is
    the old index or nothing, never a mixture, and the next build ends as one in one go.
    """
    changed = write_corpus(tmp_path / "changed.jsonl", make_documents(20, "other"))
    build(changed, tmp_path / "whole", kind=kind)
    real, stop_at, stopped = os.replace, 0, True
    while stopped:
        folder, moves = tmp_path / f"index-{stop_at}", []
        build(corpus, folder, kind=kind)

        def replace(source, target, moves=moves, stop_at=stop_at):
            moves.append(target)
            if len(moves) > stop_at:
                raise KeyboardInterrupt
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        try:
            build(changed, folder, kind=kind)
            stopped = False
        except KeyboardInterrupt:
            try:
                assert load_index(folder, FakeEncoder()).corpus_hash == corpus_hash(DOCUMENTS)
            except FileNotFoundError as error:
                assert "no finished index" in str(error)
        monkeypatch.setattr(os, "replace", real)
        build(changed, folder, kind=kind)
        assert files_of(folder) == files_of(tmp_path / "whole")
        stop_at += 1
    assert stop_at > 4


def test_half_new_hybrid_index(tmp_path, corpus):
    """A hybrid index of which one part is new is none, with other passages as with other settings."""
    build(corpus, tmp_path / "index", kind="hybrid")
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", StoppedEncoder(1, passage_prompt="other: "), kind="hybrid", k1=2.0)
    with pytest.raises(FileNotFoundError, match="no finished index"):
        load_index(tmp_path / "index", FakeEncoder())


def test_damaged_index_is_built_anew(tmp_path, corpus, caplog):
    """An index whose files are not those of its manifest does not load, and a build replaces it, saying why."""
    build(corpus, tmp_path / "index")
    files = files_of(tmp_path / "index")
    (tmp_path / "index" / "index.faiss").write_bytes(b"short")
    with pytest.raises(ValueError, match="index.faiss has 5 bytes, manifest.json says .* build the index again"):
        load_index(tmp_path / "index", FakeEncoder())
    build(corpus, tmp_path / "index")
    assert files_of(tmp_path / "index") == files
    assert "It is built anew: " in caplog.text and "index.faiss has 5 bytes" in caplog.text


def test_forms_of_a_corpus(tmp_path, corpus):
    """A gzipped corpus in the form of wiki-18 gives the same index as `id`, `title`, `text`."""
    build(corpus, tmp_path / "whole", kind="hybrid")
    rows = [{"id": d.id, "contents": f'"{d.title}"\n{d.text}'} for d in DOCUMENTS]
    other = tmp_path / "wiki.jsonl.gz"
    other.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    build(other, tmp_path / "index", kind="hybrid")
    assert files_of(tmp_path / "index") == files_of(tmp_path / "whole")


def test_dense_build_streams(tmp_path, corpus, monkeypatch):
    """A dense build never has more passages in hand than a shard holds."""
    alive, most = 0, 0

    class Counted:
        def __init__(self, document):
            nonlocal alive, most
            self.id, self.title, self.text = document.id, document.title, document.text
            alive += 1
            most = max(most, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(index, "read_corpus", lambda path: map(Counted, read_corpus(path)))
    get = StoredDocuments.__getitem__
    monkeypatch.setattr(StoredDocuments, "__getitem__", lambda self, row: Counted(get(self, row)))
    build(corpus, tmp_path / "index")
    assert most <= 4 + 1


# What is refused.


def test_refused_settings(tmp_path, corpus):
    """Unknown kinds, impossible sizes and a missing encoder are refused before anything is written."""
    for options, message in (
        ({"kind": "sparse"}, "got kind='sparse', expected one of bm25, dense, hybrid"),
        ({"faiss": "pq"}, "got faiss='pq', expected one of flat, hnsw, ivf"),
        ({"shard_size": 0}, "got shard_size=0, expected at least 1"),
        ({"kind": "dense"}, "a dense index needs an encoder"),
        ({"kind": "hybrid"}, "a hybrid index needs an encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            build_index(corpus, tmp_path / "index", **options)
        assert not (tmp_path / "index").exists()
    with pytest.raises(ValueError, match="got k1=-1.0 and b=0.4, expected"):
        build_index(corpus, tmp_path / "index", k1=-1.0)


@pytest.mark.parametrize("kind", CLASSES)
def test_refused_corpora(tmp_path, kind):
    """A corpus that is missing, empty or has a bad line is named; corrected, the build goes through."""
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(FileNotFoundError, match="no corpus file at .*corpus.jsonl"):
        build(path, tmp_path / "index", kind=kind)
    assert not (tmp_path / "index").exists()
    for content, message in (("\n", "corpus.jsonl holds no passage"), ('{"id": "1"}\n', "line 1: the key")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            build(path, tmp_path / "index", kind=kind)
        with pytest.raises(FileNotFoundError, match="no finished index"):
            load_index(tmp_path / "index")
    write_corpus(path, DOCUMENTS)
    build(path, tmp_path / "index", kind=kind)


def test_encoder_without_numbers(tmp_path, corpus):
    """Vectors that are no finite numbers stop the build: as passages they would never be found."""
    encoder = FakeEncoder()
    encoder.vector = lambda text: np.full(16, np.nan, np.float32)
    with pytest.raises(ValueError, match="the encoder 'fake' gives vectors that are not finite numbers"):
        build(corpus, tmp_path / "index", encoder)


def test_refused_folders(tmp_path, corpus):
    """A folder with something else in it, a foreign manifest, an index of another kind and a file stay untouched."""
    for name, content, message in (
        ("thesis.txt", "precious", "is not empty and holds no index, but thesis.txt; choose another folder"),
        ("manifest.json", '{"format": "webapp"}', "has a manifest.json of the format 'webapp', not of a dense index"),
        ("manifest.json", "[1]", "has a manifest.json of the format None, not of a dense index"),
    ):
        folder = tmp_path / f"{name}{len(content)}"
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            build(corpus, folder)
        assert files_of(folder) == {name: content.encode()}
    build(corpus, tmp_path / "index", kind="bm25")
    with pytest.raises(
        ValueError, match="has a manifest.json of the format 'mempo_trl.bm25/1', not of a hybrid index"
    ):
        build(corpus, tmp_path / "index", kind="hybrid")
    with pytest.raises(ValueError, match="corpus.jsonl' is a file; choose a folder"):
        build(corpus, corpus)


def test_two_builds_at_once(tmp_path, corpus):
    """A second build of the same folder is refused while the first one runs, and one that died does not block."""
    interrupt(corpus, tmp_path / "index")
    with FileLock(tmp_path / "index" / ".building" / "lock"):
        with pytest.raises(RuntimeError, match="another build is writing to .*index'; wait until it has ended"):
            build(corpus, tmp_path / "index")
    build(corpus, tmp_path / "index")


def test_wrong_folders(tmp_path):
    """What is no index does not load: no folder, an empty one, an unknown format, another kind."""
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(
            FileNotFoundError, match=f"no finished index in '{folder}' .*; build one and save it there"
        ):
            load_index(folder)
    (tmp_path / "manifest.json").write_text('{"format": "mempo_trl.dense/9", "files": {}}')
    with pytest.raises(
        ValueError, match="format 'mempo_trl.dense/9', expected 'mempo_trl.bm25/1' or 'mempo_trl.dense/1'"
    ):
        load_index(tmp_path)
    with pytest.raises(ValueError, match="format 'mempo_trl.dense/9', expected 'mempo_trl.dense/1'; build"):
        DenseRetriever.load(tmp_path)


def test_bm25_needs_no_extra(tmp_path, corpus, monkeypatch):
    """BM25 indexes are built and loaded without the packages of dense retrieval."""
    for name in ("faiss", "sentence_transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, dense.__name__)
    build_index(corpus, tmp_path / "index", "bm25")
    assert type(load_index(tmp_path / "index")) is BM25Retriever


# `mempo index`.


def test_command(tmp_path, corpus, monkeypatch, capsys):
    """The command passes its arguments on and says what it has built."""
    made = []

    def make_encoder(name, query_prompt, passage_prompt, batch_size):
        made.append((name, query_prompt, passage_prompt, batch_size))
        return FakeEncoder(name)

    monkeypatch.setattr(dense, "Encoder", make_encoder)
    level = logging.getLogger("mempo_trl").level
    arguments = ["--corpus_path", str(corpus), "--output_dir", str(tmp_path / "index"), "--kind", "hybrid"]
    arguments += ["--encoder", "my/model", "--faiss", "ivf", "--query_prompt", "Q: ", "--batch_size", "8"]
    try:
        assert cli.main(["index", *arguments, "--k1", "1.2", "--shard_size", "7"]) == 0
    finally:
        logging.getLogger("mempo_trl").setLevel(level)
    assert made == [("my/model", "Q: ", None, 8)]
    printed = capsys.readouterr().out
    assert "prompts: query 'q: ', passage 'p: '" in printed
    assert f"hybrid index of 20 passages in {tmp_path / 'index'}" in printed and corpus_hash(DOCUMENTS)[:12] in printed
    settings = json.loads((tmp_path / "index" / "dense" / "manifest.json").read_text())["settings"]
    assert settings["faiss"] == "ivf" and settings["shard_size"] == 7
    assert json.loads((tmp_path / "index" / "bm25" / "manifest.json").read_text())["settings"]["k1"] == 1.2
    with pytest.raises(ValueError, match="a dense index needs an encoder"):
        cli.main(["index", *arguments[:2], "--output_dir", str(tmp_path / "other"), "--kind", "dense"])
