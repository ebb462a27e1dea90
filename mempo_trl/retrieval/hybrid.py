"""Several retrievers as one, by reciprocal rank fusion (https://dl.acm.org/doi/10.1145/1571941.1572114)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from .document import Document, Retriever


class HybridRetriever:
    """
    Reciprocal rank fusion: a passage scores the sum of `1 / (k + rank)` over the retrievers that found it, its best rank
    being 1. The retrievers' own scores do not count, so they need not be comparable.

    Args:
        retrievers (`Sequence[Retriever]`):
            Retrievers over one and the same corpus.
        k (`int`, *optional*, defaults to `60`):
            How little the first ranks stand out. The default is the paper's.
        num_candidates (`int`, *optional*, defaults to `100`):
            Passages that each retriever is asked for, more if more are wanted.

    Raises:
        `ValueError`: The corpora differ, or one is not known.
    """

    def __init__(self, retrievers: Sequence[Retriever], k: int = 60, num_candidates: int = 100):
        if not retrievers or k < 0 or num_candidates < 1:
            raise ValueError(
                f"got {len(retrievers)} retrievers, k={k} and num_candidates={num_candidates}; expected at least one "
                "retriever, k >= 0 and num_candidates >= 1."
            )
        hashes = [retriever.corpus_hash for retriever in retrievers]
        if None in hashes or len(set(hashes)) > 1:
            raise ValueError(
                f"the retrievers search different or unknown corpora, with the hashes {hashes}; passages are fused by "
                "their ids, so build all indexes from one corpus."
            )
        self.retrievers = list(retrievers)
        self.corpus_hash = hashes[0]
        self.k = k
        self.num_candidates = num_candidates

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best passages of each query.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages with their fused scores, the best first. Of equal scores
            the one that an earlier retriever found comes first.
        """
        if top_k < 1:
            raise ValueError(f"got top_k={top_k}, expected at least 1.")
        results = [retriever.search(queries, max(top_k, self.num_candidates)) for retriever in self.retrievers]
        return [self._fuse(rankings)[:top_k] for rankings in zip(*results, strict=True)]

    def _fuse(self, rankings: Sequence[list[Document]]) -> list[Document]:
        scores, documents = defaultdict(float), {}
        for ranking in rankings:
            for rank, document in enumerate(ranking, start=1):
                scores[document.id] += 1 / (self.k + rank)
                documents.setdefault(document.id, document)
        best = sorted(documents, key=lambda id: -scores[id])
        return [replace(documents[id], score=scores[id]) for id in best]
