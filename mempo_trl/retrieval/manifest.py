"""The manifest of an index on disk: what the index is, from which corpus, with which settings and files."""

import json
import os
from collections.abc import Sequence
from pathlib import Path


MANIFEST = "manifest.json"
DOCUMENTS = "documents.jsonl"
BUILDING = ".building"
"""Folder within an index that a build works in. It is gone when the index is complete."""

FORMATS = {"bm25": "mempo_trl.bm25/1", "dense": "mempo_trl.dense/1", "hybrid": "mempo_trl.hybrid/1"}
_NAMES = {"bm25": "BM25 ", "dense": "dense ", "hybrid": "hybrid ", None: ""}


def read_manifest(folder: str | os.PathLike, kind: str | None = None) -> dict:
    """
    Reads the manifest of an index and checks it against the files.

    Args:
        folder (`str` or `os.PathLike`):
            Folder of the index.
        kind (`str`, *optional*):
            Kind that the index has to be of: `"bm25"`, `"dense"` or `"hybrid"`. By default any will do.

    Returns:
        `dict`: The manifest, with `kind` added.

    Raises:
        `FileNotFoundError`: The folder holds no finished index.
        `ValueError`: The index is of another format or its files are not those of its manifest.
    """
    folder, name = Path(folder), _NAMES[kind]
    path = folder / MANIFEST
    if not path.is_file():
        remedy = "build one and save it there"
        if (folder / BUILDING).is_dir():
            remedy = "its build was interrupted; run the same `mempo index` again to go on with it"
        raise FileNotFoundError(f"no finished {name}index in {str(folder)!r} (it has no {MANIFEST}); {remedy}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found_format, sizes = manifest["format"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        article = "an" if kind is None else "a"
        raise ValueError(
            f"{path} is not the manifest of {article} {name}index ({error!r}); build the index again."
        ) from error
    kinds = {FORMATS[known]: known for known in FORMATS if kind in (None, known)}
    if found_format not in kinds:
        expected = " or ".join(map(repr, kinds))
        raise ValueError(f"{path} has the format {found_format!r}, expected {expected}; build the index again.")
    for file_name, size in sizes.items():
        file = folder / file_name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{file} {problem}, {MANIFEST} says {size} bytes; copy or build the index again.")
    return {**manifest, "kind": kinds[found_format]}


def install_index(
    scratch: Path,
    folder: Path,
    *,
    kind: str,
    corpus_hash: str,
    num_documents: int,
    settings: dict,
    parts: Sequence[str] = (),
    **versions: str,
) -> None:
    """
    Moves the files of a complete index to their place, and writes its manifest.

    The manifest goes first and comes last: a folder without one is not an index, so that a half-written one never
    loads.

    Args:
        scratch (`Path`):
            Folder that holds the files of the index and nothing else, on the disk of `folder`.
        folder (`Path`):
            Folder of the index. Files of the same names are replaced; who has them memory-mapped keeps the old ones.
        kind (`str`):
            `"bm25"`, `"dense"` or `"hybrid"`.
        corpus_hash (`str`):
            Content hash of the passages.
        num_documents (`int`):
            Number of passages.
        settings (`dict`):
            What the index was built with.
        parts (`Sequence[str]`, *optional*):
            Subfolders that are indexes themselves.
        versions (`str`):
            Versions of packages, to be named in the manifest.
    """
    names = sorted(path.name for path in scratch.iterdir())
    sizes = {name: (scratch / name).stat().st_size for name in names}
    for part in parts:
        sizes[f"{part}/{MANIFEST}"] = (folder / part / MANIFEST).stat().st_size
    manifest = {
        "format": FORMATS[kind],
        "corpus_hash": corpus_hash,
        "num_documents": num_documents,
        "settings": settings,
        **versions,
        "files": sizes,
    }
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in [*names, MANIFEST]:
        os.replace(scratch / name, folder / name)
