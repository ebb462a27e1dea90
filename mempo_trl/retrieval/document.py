"""Passages: reading a corpus, its content hash, and its memory-mapped form on disk."""

import gzip
import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Document:
    """
    A passage of a corpus.

    Args:
        id (`str`):
            Identifier within the corpus.
        title (`str`):
            Title of the page that the passage comes from.
        text (`str`):
            Text of the passage, without the title.
        score (`float`, *optional*):
            How well it matches a query; set by a search only.
    """

    id: str
    title: str
    text: str
    score: float | None = None


class Retriever(Protocol):
    """What a search backend offers."""

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """
        Finds the best passages of each query.

        Args:
            queries (`list[str]`):
                Search strings.
            top_k (`int`):
                Highest number of passages per query.

        Returns:
            `list[list[Document]]`: For each query its passages, the best first. An empty list means that nothing was
            found; a search that could not be made raises.
        """
        ...


def read_corpus(path: str | os.PathLike) -> Iterator[Document]:
    r"""
    Reads a JSONL corpus one passage at a time. Blank lines are skipped and other keys ignored.

    Args:
        path (`str` or `os.PathLike`):
            File with one object per line, `{"id", "title", "text"}` or Search-R1's `{"id", "contents"}` (see
            [`split_contents`]), all strings. A name that ends in `.gz` is read as gzip.

    Returns:
        `Iterator[Document]`: The passages in the order of the file.

    Raises:
        `FileNotFoundError`: There is no such file.
        `ValueError`: A line cannot be read (the message names file, line and remedy), or there is no passage at all.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no corpus file at {str(path)!r}; give the path of a JSONL file with one passage a line."
        )
    return _read_lines(path)


def split_contents(contents: str) -> tuple[str, str]:
    r"""
    Splits the `contents` of a Search-R1 passage, `"Title"\ntext`, into title and text.

    The first line is the title; double quotes around it are removed once and are not required.

    Args:
        contents (`str`):
            The field `contents`.

    Returns:
        `tuple[str, str]`: Title and text.

    Raises:
        `ValueError`: There is no newline, so title and text cannot be told apart.
    """
    title, newline, text = contents.partition("\n")
    if not newline:
        raise ValueError(f'"contents" has no newline between title and text: {contents[:80]!r}')
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def corpus_hash(documents: Iterable[Document]) -> str:
    """
    Content hash of a corpus, independent of the form of the file it came from and of scores.

    Args:
        documents (`Iterable[Document]`):
            Passages; their order counts.

    Returns:
        `str`: SHA-256 as hexadecimal digits, equal to `sha256sum documents.jsonl` of a saved index.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(_to_line(document))
    return digest.hexdigest()


class StoredDocuments(Sequence[Document]):
    """
    Passages in a memory-mapped JSONL file with an array of line offsets beside it, read one at a time on access.

    Args:
        path (`str` or `os.PathLike`):
            JSONL file written by [`StoredDocuments.write`].
    """

    def __init__(self, path: str | os.PathLike):
        self._offsets = np.load(_offsets_path(path), mmap_mode="r")  # (N + 1,)
        with open(path, "rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(path: str | os.PathLike, documents: Iterable[Document]) -> None:
        """
        Writes the passages and, beside them, the offsets.

        Args:
            path (`str` or `os.PathLike`):
                JSONL file to write.
            documents (`Iterable[Document]`):
                Passages.
        """
        offsets = array("q", [0])
        with open(path, "wb") as file:
            for document in documents:
                offsets.append(offsets[-1] + file.write(_to_line(document)))
        np.save(_offsets_path(path), np.frombuffer(offsets, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Document:
        index = range(len(self))[index]
        return Document(**json.loads(self._lines[self._offsets[index] : self._offsets[index + 1]]))


def _offsets_path(path: str | os.PathLike) -> Path:
    return Path(path).with_suffix(".offsets.npy")


def _to_line(document: Document) -> bytes:
    row = {"id": document.id, "title": document.title, "text": document.text}
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8")


def _read_lines(path: Path) -> Iterator[Document]:
    empty = True
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = _parse_line(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {error}. Write one JSON object a line, in UTF-8, with strings under the "
                    'keys "id", "title", "text" or under "id", "contents" (title, newline, text).'
                ) from error
            empty = False
            yield document
    if empty:
        raise ValueError(f"{path} holds no passage; write one JSON object a line.")


def _parse_line(line: bytes) -> Document:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    contents_form = "contents" in row and not ("title" in row and "text" in row)
    fields = {}
    for key in ("id", "contents") if contents_form else ("id", "title", "text"):
        if key not in row:
            raise ValueError(f'the key "{key}" is missing, got the keys {sorted(row)}')
        value = row[key]
        if not isinstance(value, str):
            raise ValueError(f'"{key}" must be a string, got {type(value).__name__}')
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f'"{key}" holds half of a surrogate pair ({error})') from error
        fields[key] = value
    if contents_form:
        title, text = split_contents(fields["contents"])
        return Document(fields["id"], title, text)
    return Document(**fields)
