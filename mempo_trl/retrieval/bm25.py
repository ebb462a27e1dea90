"""BM25 search over a local corpus, with the [bm25s](https://huggingface.co/papers/2407.03618) package."""

import os
import re
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from tqdm import tqdm

from .document import Document, StoredDocuments, corpus_hash, read_corpus
from .manifest import DOCUMENTS, install_index, read_manifest


# Chinese characters and hiragana are words of their own, as in Lucene's standard tokenizer: these scripts put no
# spaces between words, and a whole sentence as one word would never be found.
_SINGLE = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_SINGLE}]|[^\W{_SINGLE}]+")
_STOP_WORDS = frozenset(STOPWORDS_EN)


def split_words(text: str) -> list[str]:
    """
    Splits a text into the words that BM25 counts: lower-cased, without Lucene's 33 English stop words, not stemmed.

    Args:
        text (`str`):
            Passage or query.

    Returns:
        `list[str]`: Words in the order of the text.
    """
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


class BM25Retriever:
    """
    BM25 over the title and text of passages, in Lucene's variant. Searches may run in several threads at once.

    Build one with [`BM25Retriever.from_corpus`] or [`BM25Retriever.load`].

    Args:
        index (`bm25s.BM25`):
            Scores of every word in every passage.
        documents (`Sequence[Document]`):
            Passages, in the order of the index.
        corpus_hash (`str`):
            Content hash of the passages, see [`corpus_hash`].

    Example:

    ```python
    >>> retriever = BM25Retriever.from_corpus("corpus.jsonl")
    >>> retriever.save("index")
    >>> BM25Retriever.load("index").search(["Who wrote The Trial?"], top_k=3)
    ```
    """

    def __init__(self, index: bm25s.BM25, documents: Sequence[Document], corpus_hash: str):
        self.documents = documents
        self.corpus_hash = corpus_hash
        self._index = index

    @classmethod
    def from_corpus(
        cls,
        corpus: str | os.PathLike | Iterable[Document],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        show_progress: bool = False,
    ) -> "BM25Retriever":
        """
        Indexes a corpus. It is held in memory meanwhile; save the index and load it to have it memory-mapped.

        Args:
            corpus (`str`, `os.PathLike` or `Iterable[Document]`):
                File for [`read_corpus`], or passages.
            k1 (`float`, *optional*, defaults to `0.9`):
                How slowly repetitions of a word saturate. `k1` and `b` default to Pyserini's values.
            b (`float`, *optional*, defaults to `0.4`):
                How much long passages are penalized, from 0 to 1.
            show_progress (`bool`, *optional*, defaults to `False`):
                Whether to show progress bars.

        Returns:
            [`BM25Retriever`]: The index.
        """
        if not (k1 >= 0 and 0 <= b <= 1):
            raise ValueError(f"got k1={k1} and b={b}, expected k1 >= 0 and 0 <= b <= 1.")
        if isinstance(corpus, (str, os.PathLike)):
            corpus = read_corpus(corpus)
        documents, word_ids, vocabulary = [], [], {}
        for document in tqdm(corpus, desc="Splitting passages", disable=not show_progress):
            words = split_words(f"{document.title}\n{document.text}")
            # bm25s takes any iterable of ids, and an array is smaller than a list.
            word_ids.append(array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words]))
            documents.append(document)
        if not vocabulary:
            raise ValueError(f"got {len(documents)} passages without a single word to index; check the corpus.")
        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        # The empty token that bm25s would add has no column in its score matrix, so looking it up would fail.
        index.index((word_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
        return cls(index, documents, corpus_hash(documents))

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best passages of each query.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages with their scores, the best first and equal scores in
            the order of the corpus. Passages without any word of the query are left out: a list may be short or empty.
        """
        if isinstance(queries, str):
            raise TypeError(f"got the string {queries!r}, expected a list of queries; pass [query].")
        if top_k < 1:
            raise ValueError(f"got top_k={top_k}, expected at least 1.")
        return [self._search(query, top_k) for query in queries]

    def save(self, folder: str | os.PathLike) -> None:
        """
        Writes the index and its passages, replacing an index that is there; processes that have it loaded keep theirs.

        Args:
            folder (`str` or `os.PathLike`):
                Folder to write to.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Writing over a memory-mapped file would change it under its readers; a new file in its place does not.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
            scratch = Path(scratch)
            self._index.save(scratch, show_progress=False)
            StoredDocuments.write(scratch / DOCUMENTS, self.documents)
            install_index(
                scratch,
                folder,
                kind="bm25",
                corpus_hash=self.corpus_hash,
                num_documents=len(self),
                settings={"method": self._index.method, "k1": self._index.k1, "b": self._index.b},
                bm25s_version=version("bm25s"),
            )

    @classmethod
    def load(cls, folder: str | os.PathLike, mmap: bool = True) -> "BM25Retriever":
        """
        Loads an index that [`BM25Retriever.save`] wrote.

        Args:
            folder (`str` or `os.PathLike`):
                Folder of the index.
            mmap (`bool`, *optional*, defaults to `True`):
                Whether to leave scores and passages on disk, memory-mapped; only the vocabulary is read. `False` reads
                everything, and then checks the passages against the corpus hash.

        Returns:
            [`BM25Retriever`]: The index.

        Raises:
            `FileNotFoundError`: The folder holds no finished index.
            `ValueError`: The index is of another format or its files are not those of its manifest.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, "bm25")
        index = bm25s.BM25.load(folder, mmap=mmap)
        documents = StoredDocuments(folder / DOCUMENTS)
        if not mmap:
            documents = list(documents)
            if corpus_hash(documents) != manifest["corpus_hash"]:
                raise ValueError(f"the passages in {folder} are not those that were indexed; build the index again.")
        return cls(index, documents, manifest["corpus_hash"])

    def _search(self, query: str, top_k: int) -> list[Document]:
        word_ids = self._index.get_tokens_ids(split_words(query))
        scores = self._index.get_scores_from_ids(word_ids)  # (N,)
        found = np.flatnonzero(scores > 0)
        if len(found) > top_k:
            # Keep all that tie with the last one, so that the stable sort decides between them.
            lowest = np.partition(scores[found], -top_k)[-top_k]
            found = found[scores[found] >= lowest]
        best = found[np.argsort(-scores[found], kind="stable")][:top_k]
        return [replace(self.documents[index], score=float(scores[index])) for index in best]
