"""`mempo serve`: a search server over a corpus or an index."""

import argparse
from dataclasses import dataclass, field

from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.hybrid import HybridRetriever
from mempo_trl.retrieval.index import load_index
from mempo_trl.retrieval.manifest import FORMATS, read_manifest
from mempo_trl.retrieval.server import bind, make_app, run_server
from mempo_trl.scripts.recipes import RecipeParser


@dataclass
class ServeArguments:
    """
    What to serve, and where.

    Args:
        corpus_path (`str`, *optional*):
            Corpus as JSON Lines with `id`, `title` and `text`, or `id` and `contents`. It is indexed with BM25 at the
            start.
        index_path (`str`, *optional*):
            Folder of an index of `mempo index`, instead of a corpus.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on.
        port (`int`, *optional*, defaults to `8000`):
            Port; 0 takes a free one.
        allow_remote (`bool`, *optional*, defaults to `False`):
            Whether `host` may be an address that other machines reach.
        log_file (`str`, *optional*):
            File for one line per request and for errors.
        default_top_k (`int`, *optional*, defaults to `3`):
            Passages per query where a request does not say.
        max_top_k (`int`, *optional*, defaults to `100`):
            Highest number of passages per query.
        max_queue (`int`, *optional*, defaults to `4096`):
            Highest number of queries that wait, and of one request.
        max_batch (`int`, *optional*, defaults to `256`):
            Highest number of queries, of several requests, that are searched together.
    """

    corpus_path: str | None = field(
        default=None,
        metadata={"help": "Corpus as JSON Lines with id, title and text, or id and contents. Indexed with BM25."},
    )
    index_path: str | None = field(
        default=None, metadata={"help": "Folder of an index of mempo index, instead of a corpus."}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=8000, metadata={"help": "Port; 0 takes a free one."})
    allow_remote: bool = field(
        default=False, metadata={"help": "Whether host may be an address that other machines reach."}
    )
    log_file: str | None = field(default=None, metadata={"help": "File for one line per request and for errors."})
    default_top_k: int = field(default=3, metadata={"help": "Passages per query where a request does not say."})
    max_top_k: int = field(default=100, metadata={"help": "Highest number of passages per query."})
    max_queue: int = field(default=4096, metadata={"help": "Highest number of queries that wait, and of one request."})
    max_batch: int = field(
        default=256, metadata={"help": "Highest number of queries, of several requests, that are searched together."}
    )

    def __post_init__(self):
        if (self.corpus_path is None) == (self.index_path is None):
            raise ValueError(
                f"got corpus_path={self.corpus_path!r} and index_path={self.index_path!r}; give exactly one of them."
            )


def main(args: ServeArguments) -> None:
    """Load, say where the server is, and serve until it is stopped."""
    with bind(args.host, args.port, args.allow_remote) as listener:
        if args.corpus_path is not None:
            retriever = BM25Retriever.from_corpus(args.corpus_path, show_progress=True)
        else:
            retriever = load_index(args.index_path)
        is_hybrid = isinstance(retriever, HybridRetriever)
        documents = retriever.retrievers[0].documents if is_hybrid else retriever.documents
        app = make_app(
            retriever,
            documents=documents,
            index_format=FORMATS["bm25"] if args.index_path is None else read_manifest(args.index_path)["format"],
            corpus_hash=retriever.corpus_hash,
            default_top_k=args.default_top_k,
            max_top_k=args.max_top_k,
            max_queue=args.max_queue,
            max_batch=args.max_batch,
        )
        listener.listen()
        host, port = listener.getsockname()[:2]
        print(f"Serving {len(documents)} passages on http://{host}:{port}", flush=True)
        run_server(app, listener, args.log_file)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of this script."""
    return RecipeParser((ServeArguments,), prog=prog)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
