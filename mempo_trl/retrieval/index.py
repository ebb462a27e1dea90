"""Indexes on disk: loading any of them, and building them so that an interrupted build goes on where it stopped."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from .bm25 import BM25Retriever
from .document import Document, Retriever, StoredDocuments, corpus_hash, read_corpus
from .hybrid import HybridRetriever
from .manifest import BUILDING, DOCUMENTS, FORMATS, MANIFEST, install_index, read_manifest


# `dense.py` needs an extra that whoever only uses BM25 does not have, so it is imported where it is used.
if TYPE_CHECKING:
    from .dense import Encoder

logger = logging.getLogger(__name__)

FAISS_KINDS = ("flat", "hnsw", "ivf")
_PARTS = ("bm25", "dense")
_SHARDS_OF = "shards_of.json"


def load_index(folder: str | os.PathLike, encoder: "Encoder | None" = None) -> Retriever:
    """
    Loads an index of any kind, memory-mapped.

    Args:
        folder (`str` or `os.PathLike`):
            Folder that [`build_index`] or [`BM25Retriever.save`] wrote.
        encoder ([`~mempo_trl.retrieval.dense.Encoder`], *optional*):
            Encoder of a dense or hybrid index, instead of loading the one that the index names.

    Returns:
        [`BM25Retriever`], [`~mempo_trl.retrieval.dense.DenseRetriever`] or [`HybridRetriever`]

    Raises:
        `FileNotFoundError`: The folder holds no finished index.
        `ValueError`: The index is of an unknown format, its files are not those of its manifest, or the encoder is not
            the one of the index.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["kind"] == "bm25":
        return BM25Retriever.load(folder)
    if manifest["kind"] == "dense":
        from .dense import DenseRetriever

        return DenseRetriever.load(folder, encoder)
    return HybridRetriever([load_index(folder / part, encoder) for part in _PARTS], k=manifest["settings"]["k"])


def build_index(
    corpus_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    kind: Literal["bm25", "dense", "hybrid"] = "bm25",
    *,
    encoder: "Encoder | None" = None,
    faiss: Literal["flat", "hnsw", "ivf"] = "flat",
    k1: float = 0.9,
    b: float = 0.4,
    shard_size: int = 2048,
    show_progress: bool = False,
) -> dict:
    """
    Builds an index from a corpus file. The folder is an index only once everything in it is complete.

    Interrupted at any point and called again, a dense build keeps the passages that it has encoded, in shards on disk,
    as long as corpus, encoder and shard size are the same. BM25 holds the corpus in memory and starts anew.

    Args:
        corpus_path (`str` or `os.PathLike`):
            File for [`read_corpus`].
        output_dir (`str` or `os.PathLike`):
            Folder of the index: a new one, an empty one, or one with an index or an unfinished build of the same kind.
            A BM25 or dense index that is there stays until the new one is complete.
        kind (`str`, *optional*, defaults to `"bm25"`):
            `"bm25"`, `"dense"`, or `"hybrid"` for both.
        encoder ([`~mempo_trl.retrieval.dense.Encoder`], *optional*):
            Encoder, required unless `kind="bm25"`.
        faiss (`str`, *optional*, defaults to `"flat"`):
            How vectors are searched: `"flat"`, `"hnsw"` or `"ivf"`, see [`~mempo_trl.retrieval.dense.write_faiss`].
        k1 (`float`, *optional*, defaults to `0.9`), b (`float`, *optional*, defaults to `0.4`):
            As in [`BM25Retriever.from_corpus`].
        shard_size (`int`, *optional*, defaults to `2048`):
            Passages that are encoded between two saves.
        show_progress (`bool`, *optional*, defaults to `False`):
            Whether to show progress bars.

    Returns:
        `dict`: The manifest of the index.
    """
    if kind not in FORMATS:
        raise ValueError(f"got kind={kind!r}, expected one of {', '.join(FORMATS)}.")
    if faiss not in FAISS_KINDS:
        raise ValueError(f"got faiss={faiss!r}, expected one of {', '.join(FAISS_KINDS)}.")
    if shard_size < 1:
        raise ValueError(f"got shard_size={shard_size}, expected at least 1.")
    if kind != "bm25" and encoder is None:
        raise ValueError(f"a {kind} index needs an encoder, such as intfloat/e5-base-v2; pass one.")
    read_corpus(corpus_path)  # a path that does not exist is refused before anything is written
    folder = Path(output_dir)
    _check_folder(folder, kind)
    (folder / BUILDING).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / BUILDING / "lock", timeout=0):
            if kind == "bm25":
                _build_bm25(corpus_path, folder, k1, b, show_progress)
            elif kind == "dense":
                _build_dense(corpus_path, folder, encoder, faiss, shard_size, show_progress)
            else:
                # While one part is new and the other old, there is no index.
                (folder / MANIFEST).unlink(missing_ok=True)
                common = dict(encoder=encoder, faiss=faiss, k1=k1, b=b, shard_size=shard_size)
                for part in _PARTS:
                    manifest = build_index(corpus_path, folder / part, part, **common, show_progress=show_progress)
                install_index(
                    _make_scratch(folder),
                    folder,
                    kind="hybrid",
                    corpus_hash=manifest["corpus_hash"],
                    num_documents=manifest["num_documents"],
                    settings={"k": 60},
                    parts=_PARTS,
                )
            shutil.rmtree(folder / BUILDING)
    except Timeout as error:
        raise RuntimeError(f"another build is writing to {str(folder)!r}; wait until it has ended.") from error
    return read_manifest(folder, kind)


def _check_folder(folder: Path, kind: str) -> None:
    """Refuses to write among files that are not an index of this kind."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file; choose a folder for the index.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if MANIFEST in names:
        try:
            found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["format"]
        except (ValueError, KeyError, TypeError):
            found = None
        if found != FORMATS[kind]:
            raise ValueError(
                f"{str(folder)!r} has a {MANIFEST} of the format {found!r}, not of a {kind} index; choose another folder "
                "or remove it."
            )
    elif names and BUILDING not in names:
        raise ValueError(
            f"{str(folder)!r} is not empty and holds no index, but {', '.join(sorted(names)[:5])}; choose another folder."
        )


def _is_complete(folder: Path, kind: str, settings: dict, corpus_path: str | os.PathLike, show_progress: bool) -> bool:
    """Whether the folder has the very index that is to be built; if it has another one, says that this will go."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_manifest(folder, kind)
    except ValueError as error:
        logger.warning("It is built anew: %s", error)
        return False
    changed = "settings"
    if manifest["settings"] == settings:
        if corpus_hash(_read_corpus(corpus_path, "Comparing passages", show_progress)) == manifest["corpus_hash"]:
            logger.info("The index in %s is complete already.", folder)
            return True
        changed = "passages"
    logger.warning("The index in %s has other %s: it is built anew.", folder, changed)
    return False


def _build_bm25(corpus_path: str | os.PathLike, folder: Path, k1: float, b: float, show_progress: bool) -> None:
    if _is_complete(folder, "bm25", {"method": "lucene", "k1": k1, "b": b}, corpus_path, show_progress):
        return
    for leftover in folder.glob(".saving-*"):
        shutil.rmtree(leftover)
    BM25Retriever.from_corpus(corpus_path, k1=k1, b=b, show_progress=show_progress).save(folder)


def _build_dense(
    corpus_path: str | os.PathLike,
    folder: Path,
    encoder: "Encoder",
    faiss: str,
    shard_size: int,
    show_progress: bool,
) -> None:
    from .dense import FAISS_FILE, write_faiss

    passages_by = {
        "encoder": encoder.name,
        "passage_prompt": encoder.passage_prompt,
        "max_length": encoder.max_length,
        "shard_size": shard_size,
    }
    settings = {**passages_by, "query_prompt": encoder.query_prompt, "faiss": faiss}
    if _is_complete(folder, "dense", settings, corpus_path, show_progress):
        return
    scratch = _make_scratch(folder)
    StoredDocuments.write(scratch / DOCUMENTS, _read_corpus(corpus_path, "Reading passages", show_progress))
    documents = StoredDocuments(scratch / DOCUMENTS)
    corpus = _sha256(scratch / DOCUMENTS)
    shards_of = {"corpus_hash": corpus, **passages_by}
    shards = _encode(documents, folder / BUILDING, encoder, shards_of, shard_size, show_progress)
    write_faiss(scratch / FAISS_FILE, faiss, shards, show_progress)
    install_index(
        scratch,
        folder,
        kind="dense",
        corpus_hash=corpus,
        num_documents=len(documents),
        settings=settings,
        sentence_transformers_version=version("sentence-transformers"),
    )


def _encode(
    documents: StoredDocuments,
    building: Path,
    encoder: "Encoder",
    shards_of: dict,
    shard_size: int,
    show_progress: bool,
) -> list[Path]:
    """Files with the vectors of the passages, in float16. Those that an earlier build finished are kept."""
    sizes = {
        building / f"embeddings-{start:010}.npy": min(shard_size, len(documents) - start)
        for start in range(0, len(documents), shard_size)
    }
    first = _read_shard(*next(iter(sizes.items())))
    _discard_other_shards(building, shards_of, encoder, documents[0], None if first is None else first[0])
    done = {path for path, size in sizes.items() if _read_shard(path, size) is not None}
    for path in sizes:
        if path not in done and path.exists():
            logger.warning("%s is damaged: its passages are encoded again.", path)
    if done:
        logger.info("%d of %d shards of vectors are there.", len(done), len(sizes))
    bar = tqdm(
        total=len(documents),
        initial=sum(sizes[path] for path in done),
        desc="Encoding passages",
        unit=" passages",
        disable=not show_progress,
    )
    start = 0
    with bar:
        for path, size in sizes.items():
            if path not in done:
                vectors = encoder.encode_passages([documents[row] for row in range(start, start + size)])
                if not np.isfinite(vectors).all():
                    raise ValueError(f"the encoder {encoder.name!r} gives vectors that are not finite numbers.")
                _write_whole(path, lambda file, vectors=vectors: np.save(file, vectors.astype(np.float16)))
                bar.update(size)
            start += size
    return list(sizes)


def _discard_other_shards(
    building: Path, shards_of: dict, encoder: "Encoder", document: Document, stored: np.ndarray | None
) -> None:
    """Leaves shards only if they are of this corpus, these settings and this encoder, by the first passage's vector."""
    from .dense import SAME_VECTOR

    note, changed = building / _SHARDS_OF, None
    if note.is_file():
        if json.loads(note.read_text(encoding="utf-8")) != shards_of:
            changed = "corpus or settings"
        elif stored is not None:
            # The folder of a model stays the same when the model in it is trained further.
            vector = encoder.encode_passages([document])[0]
            if vector.shape != stored.shape or not vector @ stored > SAME_VECTOR:
                changed = "encoder"
        if changed is None:
            return
        logger.warning("The %s changed since the build in %s was interrupted: it starts anew.", changed, building)
    # The note goes first and comes last, as a manifest does.
    note.unlink(missing_ok=True)
    for path in building.glob("embeddings-*"):
        path.unlink()
    _write_whole(note, lambda file: file.write(json.dumps(shards_of).encode()))


def _read_shard(path: Path, size: int) -> np.ndarray | None:
    """Vectors of so many passages, memory-mapped; `None` if the file is missing, cut off or something else."""
    try:
        shard = np.load(path, mmap_mode="r")
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return shard if shard.ndim == 2 and len(shard) == size and shard.dtype == np.float16 else None


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A file that is either complete or not there under its name."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        write(file)
    os.replace(unfinished, path)


def _make_scratch(folder: Path) -> Path:
    scratch = folder / BUILDING / "index"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return scratch


def _read_corpus(path: str | os.PathLike, what: str, show_progress: bool) -> Iterable[Document]:
    return tqdm(read_corpus(path), desc=what, unit=" passages", disable=not show_progress)


def _sha256(path: Path) -> str:
    """Equal to the corpus hash of the passages in the file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
