"""The search tool that the model calls."""

from transformers import PreTrainedTokenizerBase

from ..tools import NO_RESULTS, ToolError
from .document import Document, Retriever


MAX_QUERY_LENGTH = 8192
"""Characters of a query that are searched for, as many as `mempo serve` takes: what a model writes fails no search."""


class SearchTool:
    """
    Searches a corpus and renders the passages as a tool response. A search that cannot be made raises.

    Args:
        retriever ([`Retriever`]):
            Anything with `search(queries, top_k)`.
        top_k (`int`, *optional*, defaults to `3`):
            Highest number of passages per query.
        max_passage_tokens (`int`, *optional*):
            Length to which the text of each passage is cut, in tokens. By default it is not cut.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Fast tokenizer that counts them, required with `max_passage_tokens`.
        max_batch (`int`, *optional*, defaults to `1`):
            Highest number of searches of a turn that training gives to the retriever as one list, instead of one by
            one at the same time. More is faster for a dense index and for a server that takes lists.

    Example:

    ```python
    >>> search = SearchTool(BM25Retriever.load("index"), top_k=1)
    >>> search("Franz Kafka")
    'Doc 1(Title: Franz Kafka) Franz Kafka was a German-language writer…'
    ```
    """

    name = "search"

    def __init__(
        self,
        retriever: Retriever,
        top_k: int = 3,
        max_passage_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch: int = 1,
    ):
        if top_k < 1:
            raise ValueError(f"got top_k={top_k}, expected at least 1.")
        if max_batch < 1:
            raise ValueError(f"got max_batch={max_batch}, expected at least 1.")
        if max_passage_tokens is not None:
            if max_passage_tokens < 1:
                raise ValueError(f"got max_passage_tokens={max_passage_tokens}, expected at least 1 or `None`.")
            if tokenizer is None:
                raise ValueError(
                    f"got max_passage_tokens={max_passage_tokens} but no `tokenizer` to count with; pass one."
                )
            if not tokenizer.is_fast:
                raise ValueError(
                    f"{type(tokenizer).__name__} does not tell where its tokens are in the text, which "
                    "`max_passage_tokens` needs; pass a fast tokenizer."
                )
        self.retriever = retriever
        self.top_k = top_k
        self.max_passage_tokens = max_passage_tokens
        self.tokenizer = tokenizer
        self.max_batch = max_batch

    def __call__(self, query: str) -> str:
        """
        Searches the corpus and returns the passages that match best.

        Args:
            query: The search query.

        Returns:
            The passages found, each with its title.
        """
        return self._render(self.search(query))

    def search(self, query: str) -> list[Document]:
        """
        Finds the best passages of one query.

        Args:
            query (`str`):
                Search string.

        Returns:
            `list[Document]`: Passages, the best first; empty when nothing was found.
        """
        return self._search([query])[0]

    def answer(self, queries: list[str]) -> list[str]:
        """
        Answers several calls with one search.

        Args:
            queries (`list[str]`):
                Search strings.

        Returns:
            `list[str]`: What a call would return for each.
        """
        return [self._render(documents) for documents in self._search(queries)]

    def _search(self, queries: list[str]) -> list[list[Document]]:
        queries = [query[:MAX_QUERY_LENGTH] for query in queries]
        results = self.retriever.search(queries, self.top_k)
        if len(results) != len(queries):  # passages of another query, perhaps
            asked = "1 query" if len(queries) == 1 else f"{len(queries)} queries"
            raise ToolError(f"{type(self.retriever).__name__} gave {len(results)} lists of passages for {asked}")
        return results

    def _render(self, documents: list[Document]) -> str:
        if not documents:
            return NO_RESULTS
        return "\n".join(
            f"Doc {i}(Title: {document.title}) {self._cut(document.text)}"
            for i, document in enumerate(documents, start=1)
        )

    def _cut(self, text: str) -> str:
        if self.max_passage_tokens is None:
            return text
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) <= self.max_passage_tokens:
            return text
        # Where the first token that is dropped starts: a character whose bytes lie on both sides is dropped whole.
        return text[: offsets[self.max_passage_tokens][0]].rstrip()
