"""`mempo index`: a BM25, dense or hybrid index of a corpus, on disk."""

import argparse
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from mempo_trl.retrieval.index import FAISS_KINDS, build_index
from mempo_trl.retrieval.manifest import FORMATS
from mempo_trl.scripts.recipes import RecipeParser


@dataclass
class IndexArguments:
    """
    What to index, and how.

    Args:
        corpus_path (`str`):
            Corpus as JSON Lines with `id`, `title` and `text`, or `id` and `contents`; gzip if it ends in `.gz`.
        output_dir (`str`):
            Folder of the index. Called again after an interruption, the build goes on where it stopped.
        kind (`str`, *optional*, defaults to `"bm25"`):
            `"bm25"`, `"dense"`, or `"hybrid"` for both.
        encoder (`str`, *optional*):
            Sentence-transformers model of a dense or hybrid index, on the Hub or in a folder.
        faiss (`str`, *optional*, defaults to `"flat"`):
            How vectors are searched: `"flat"` (exact), `"hnsw"` (graph) or `"ivf"` (lists around centroids).
        query_prompt (`str`, *optional*), passage_prompt (`str`, *optional*):
            What goes before each query and each passage. By default what the encoder brings or is known for.
        batch_size (`int`, *optional*, defaults to `64`):
            Passages that are encoded at a time.
        shard_size (`int`, *optional*, defaults to `2048`):
            Passages that are encoded between two saves.
        k1 (`float`, *optional*, defaults to `0.9`):
            BM25: how slowly repetitions of a word saturate.
        b (`float`, *optional*, defaults to `0.4`):
            BM25: how much long passages are penalized, from 0 to 1.
    """

    corpus_path: str = field(
        metadata={"help": "Corpus as JSON Lines with id, title and text, or id and contents; may be gzipped."}
    )
    output_dir: str = field(metadata={"help": "Folder of the index. An interrupted build goes on where it stopped."})
    kind: str = field(
        default="bm25", metadata={"help": "'bm25', 'dense', or 'hybrid' for both.", "choices": list(FORMATS)}
    )
    encoder: str | None = field(
        default=None,
        metadata={"help": "Sentence-transformers model of a dense or hybrid index, on the Hub or in a folder."},
    )
    faiss: str = field(
        default="flat",
        metadata={
            "help": "How vectors are searched: 'flat' (exact), 'hnsw' (graph) or 'ivf' (lists around centroids).",
            "choices": list(FAISS_KINDS),
        },
    )
    query_prompt: str | None = field(
        default=None, metadata={"help": "What goes before each query. By default what the encoder is known for."}
    )
    passage_prompt: str | None = field(
        default=None, metadata={"help": "What goes before each passage. By default what the encoder is known for."}
    )
    batch_size: int = field(default=64, metadata={"help": "Passages that are encoded at a time."})
    shard_size: int = field(default=2048, metadata={"help": "Passages that are encoded between two saves."})
    k1: float = field(default=0.9, metadata={"help": "BM25: how slowly repetitions of a word saturate."})
    b: float = field(default=0.4, metadata={"help": "BM25: how much long passages are penalized, from 0 to 1."})


def main(args: IndexArguments) -> dict:
    """Build the index and print what it is."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("mempo_trl").setLevel(logging.INFO)
    encoder = None
    if args.kind != "bm25" and args.encoder is not None:
        from mempo_trl.retrieval.dense import Encoder

        encoder = Encoder(args.encoder, args.query_prompt, args.passage_prompt, args.batch_size)
        print(f"prompts: query {encoder.query_prompt!r}, passage {encoder.passage_prompt!r}")
    start = time.perf_counter()
    manifest = build_index(
        args.corpus_path,
        args.output_dir,
        args.kind,
        encoder=encoder,
        faiss=args.faiss,
        k1=args.k1,
        b=args.b,
        shard_size=args.shard_size,
        show_progress=True,
    )
    size = sum(path.stat().st_size for path in Path(args.output_dir).rglob("*") if path.is_file())
    print(
        f"{args.kind} index of {manifest['num_documents']:,} passages in {args.output_dir}: {size / 1e6:,.1f} MB, "
        f"{time.perf_counter() - start:.1f} s, corpus {manifest['corpus_hash'][:12]}"
    )
    return manifest


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser(IndexArguments, prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
