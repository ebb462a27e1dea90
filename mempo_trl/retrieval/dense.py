"""Dense search over a local corpus: a sentence-transformers encoder and a FAISS index of inner products."""

import os
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .document import Document, StoredDocuments
from .manifest import DOCUMENTS, read_manifest


try:
    import faiss
    from sentence_transformers import SentenceTransformer
except ImportError as error:
    raise ImportError(
        f"dense retrieval needs FAISS and sentence-transformers ({error}); install them with "
        "`pip install mempo_trl[dense]`."
    ) from error


FAISS_FILE = "index.faiss"

SAME_VECTOR = 0.99
"""Inner product above which two vectors of one passage come from the same encoder; rounding to float16 stays above."""

# Prompts that the models were trained with and that their files do not tell: the name of the model, what goes before a
# query, what goes before a passage.
_PROMPTS = (
    (r"e5-.*instruct", "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ", ""),
    (r"\be5-", "query: ", "passage: "),
    (r"\bbge-.*-en\b", "Represent this sentence for searching relevant passages: ", ""),
    (r"\bbge-.*-zh\b", "为这个句子生成表示以用于检索相关文章：", ""),
)  # fmt: skip

# HNSW: links of a passage, and candidates that are kept while it is linked and while a query is searched.
_LINKS, _CONSTRUCTION, _SEARCH = 32, 200, 128
# IVF: training passages per list (FAISS wants at least 39), and lists that a query looks into.
_TRAINING, _PROBES = 64, 128


class Encoder:
    """
    A sentence-transformers model that turns queries and passages into vectors of length 1. It runs on a GPU if there is
    one, there in float16. Threads take turns.

    Args:
        name (`str` or `os.PathLike`):
            Model on the Hub, or its folder.
        query_prompt (`str`, *optional*):
            What goes before each query. By default what the model brings; if it brings nothing, what is known for its
            name (E5, BGE); else nothing.
        passage_prompt (`str`, *optional*):
            What goes before each passage, by default as for `query_prompt`.
        batch_size (`int`, *optional*, defaults to `64`):
            Texts that are encoded at a time.

    Example:

    ```python
    >>> Encoder("intfloat/e5-base-v2").query_prompt
    'query: '
    ```
    """

    def __init__(
        self,
        name: str | os.PathLike,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        batch_size: int = 64,
    ):
        if batch_size < 1:
            raise ValueError(f"got batch_size={batch_size}, expected at least 1.")
        # The index remembers the encoder, and may be searched from another working directory.
        self.name = str(Path(name).resolve()) if Path(name).is_dir() else str(name)
        try:
            self._model = SentenceTransformer(self.name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the encoder {self.name!r} cannot be loaded ({str(error).splitlines()[0]}); give a sentence-transformers "
                "model on the Hub or the folder of one."
            ) from error
        if self._model.device.type == "cuda":
            self._model.half()
        query, passage = find_prompts(self.name, self._model.prompts)
        self.query_prompt = query if query_prompt is None else query_prompt
        self.passage_prompt = passage if passage_prompt is None else passage_prompt
        self.max_length = self._model.max_seq_length
        self.batch_size = batch_size
        self._lock = threading.Lock()

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Vectors of queries, float32 of shape `(len(queries), dimension)`."""
        return self._encode(queries, self.query_prompt)

    def encode_passages(self, documents: Sequence[Document]) -> np.ndarray:
        """Vectors of passages with their titles, float32 of shape `(len(documents), dimension)`."""
        return self._encode([f"{document.title}\n{document.text}" for document in documents], self.passage_prompt)

    def _encode(self, texts: list[str], prompt: str) -> np.ndarray:
        # A fast tokenizer that truncates and pads must not be used by two threads at once.
        with self._lock:
            # An explicit prompt, even an empty one, keeps the model's default prompt away.
            vectors = self._model.encode(
                texts, prompt=prompt, batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)


def find_prompts(name: str, own_prompts: dict[str, str]) -> tuple[str, str]:
    """
    The prompts of an encoder: its own if it brings any, else those that are known for its name, else none.

    Args:
        name (`str`):
            Model on the Hub, or its folder.
        own_prompts (`dict[str, str]`):
            Prompts in the configuration of the model.

    Returns:
        `tuple[str, str]`: What goes before a query and before a passage.
    """
    query = own_prompts.get("query") or ""
    passage = own_prompts.get("document") or own_prompts.get("passage") or ""
    if query or passage:
        return query, passage
    for pattern, query, passage in _PROMPTS:
        if re.search(pattern, Path(name).name.lower()):
            return query, passage
    return "", ""


class DenseRetriever:
    """
    Nearest passages by the inner product of normalised vectors. Searches may run in several threads at once.

    `mempo index` builds one; see [`load_index`].

    Args:
        index (`faiss.Index`):
            Vectors of the passages.
        documents (`Sequence[Document]`):
            Passages, in the order of the index.
        corpus_hash (`str`):
            Content hash of the passages.
        encoder ([`Encoder`]):
            Encoder of the queries, the one that the passages were encoded with.

    Raises:
        `ValueError`: The encoder is not the one of the index.
    """

    def __init__(self, index: faiss.Index, documents: Sequence[Document], corpus_hash: str, encoder: Encoder):
        if index.ntotal != len(documents):
            raise ValueError(f"the FAISS index has {index.ntotal} vectors for {len(documents)} passages.")
        self.documents = documents
        self.corpus_hash = corpus_hash
        self.encoder = encoder
        self._index = index
        self._check_encoder()

    @classmethod
    def load(cls, folder: str | os.PathLike, encoder: Encoder | None = None) -> "DenseRetriever":
        """
        Loads an index. Vectors and passages stay on disk, memory-mapped.

        Args:
            folder (`str` or `os.PathLike`):
                Folder of the index.
            encoder ([`Encoder`], *optional*):
                Encoder to use instead of loading the one that the index names, for instance from another folder.

        Returns:
            [`DenseRetriever`]: The index.

        Raises:
            `FileNotFoundError`: The folder holds no finished index.
            `ValueError`: The index is of another format, its files are not those of its manifest, or the encoder is
                not the one of the index.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, "dense")
        if encoder is None:
            settings = manifest["settings"]
            encoder = Encoder(settings["encoder"], settings["query_prompt"], settings["passage_prompt"])
        index = faiss.read_index(str(folder / FAISS_FILE), faiss.IO_FLAG_MMAP_IFC)
        return cls(index, StoredDocuments(folder / DOCUMENTS), manifest["corpus_hash"], encoder)

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the nearest passages of each query. The queries of one call are encoded and searched together.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages with their scores, the best first and equal scores in
            the order of the corpus.
        """
        if isinstance(queries, str):
            raise TypeError(f"got the string {queries!r}, expected a list of queries; pass [query].")
        if top_k < 1:
            raise ValueError(f"got top_k={top_k}, expected at least 1.")
        if not queries:
            return []
        scores, rows = self._index.search(self.encoder.encode_queries(queries), min(top_k, len(self)))  # (Q, K)
        return [self._documents(*found) for found in zip(scores, rows, strict=True)]

    def _documents(self, scores: np.ndarray, rows: np.ndarray) -> list[Document]:
        # FAISS fills up with -1 where it found fewer; as a position, that would be the last passage.
        order = [place for place in np.lexsort((rows, -scores)) if rows[place] >= 0]
        return [replace(self.documents[int(rows[place])], score=float(scores[place])) for place in order]

    def _check_encoder(self) -> None:
        """Another encoder would find passages too, but the wrong ones: the first passage tells."""
        vector = self.encoder.encode_passages([self.documents[0]])
        if vector.shape[1] != self._index.d:
            raise ValueError(
                f"the encoder {self.encoder.name!r} gives {vector.shape[1]} dimensions, the index has {self._index.d}; "
                "use the encoder that the index was built with, or build the index again."
            )
        # What a quantizer's list would take a search to find, the others know by its place.
        if isinstance(self._index, faiss.IndexIVF):
            score = self._index.search(vector, 1)[0].item()
        else:
            score = float(vector[0] @ self._index.reconstruct(0))
        if not score > SAME_VECTOR:
            raise ValueError(
                f"the encoder {self.encoder.name!r} is not the one that the index was built with: for the first passage "
                f"the product of its vector and the stored one is {score:.3f}, expected 1; use the same encoder and "
                "passage prompt, or build the index again."
            )


def write_faiss(path: Path, kind: str, shards: Sequence[Path], show_progress: bool = False) -> None:
    """
    Writes a FAISS index of inner products.

    Args:
        path (`Path`):
            File to write.
        kind (`str`):
            `"flat"` (exact; float32, written without being held in memory), `"hnsw"` (graph) or `"ivf"` (lists around
            centroids, trained on a sample). The last two keep float16 and hold the index in memory meanwhile.
        shards (`Sequence[Path]`):
            `.npy` files with vectors in float16, in the order of the passages.
        show_progress (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar.
    """
    starts = np.cumsum([0, *(len(np.load(shard, mmap_mode="r")) for shard in shards)])
    count, dimension = int(starts[-1]), np.load(shards[0], mmap_mode="r").shape[1]
    vectors = (np.load(shard).astype(np.float32) for shard in tqdm(shards, f"FAISS {kind}", disable=not show_progress))
    half = faiss.ScalarQuantizer.QT_fp16
    if kind == "flat":
        # What `faiss.write_index` writes before the vectors: tag, dimension, count, two unused fields, whether trained,
        # metric, number of floats.
        unused, metric = 1 << 20, faiss.METRIC_INNER_PRODUCT
        header = struct.pack("<4siqqq?iQ", b"IxFI", dimension, count, unused, unused, True, metric, count * dimension)
        with open(path, "wb") as file:
            file.write(header)
            for shard in vectors:
                file.write(shard.tobytes())
        return
    if kind == "hnsw":
        index = faiss.IndexHNSWSQ(dimension, half, _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction, index.hnsw.efSearch = _CONSTRUCTION, _SEARCH
        index.train(np.load(shards[0]).astype(np.float32))
    else:
        lists = max(1, min(int(4 * count**0.5), count // _TRAINING))
        centroids = faiss.IndexFlatIP(dimension)
        index = faiss.IndexIVFScalarQuantizer(centroids, dimension, lists, half, faiss.METRIC_INNER_PRODUCT, False)
        index.nprobe = min(_PROBES, lists)
        index.train(_sample(shards, starts, min(count, lists * _TRAINING)))
    for shard in vectors:
        index.add(shard)
    faiss.write_index(index, str(path))


def _sample(shards: Sequence[Path], starts: np.ndarray, size: int) -> np.ndarray:
    """Random rows without repetition, the same ones every time."""
    rows = np.sort(np.random.default_rng(0).choice(starts[-1], size, replace=False))
    parts = []
    for shard, start, end in zip(shards, starts[:-1], starts[1:], strict=True):
        parts.append(np.load(shard, mmap_mode="r")[rows[(rows >= start) & (rows < end)] - start])
    return np.concatenate(parts).astype(np.float32)
