"""
The quickstart: a small agent learns to search and to remember, from nothing, on a CPU.

It runs the same commands that a user would type (it prints each of them), one after the other:
the built-in village, the cold start, an evaluation, MemPO, and the evaluation again.

    python recipes/village/quickstart.py --output_dir out/quickstart
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path


RECIPES = Path(__file__).parent


def run(*command: str) -> float:
    """Run a command of this Python environment, show it, stop on failure; return the seconds it took."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], check=True)
    return time.perf_counter() - start


def main(output_dir: str) -> None:
    """Run the steps and write `summary.json`."""
    out = Path(output_dir)
    village, start = out / "village", time.perf_counter()
    seconds = {}
    seconds["village"] = run(
        "mempo_trl.data.village", "--config", f"{RECIPES}/village.yaml", "--output_dir", f"{village}"
    )
    seconds["sft"] = run(
        "mempo_trl.cli", "sft", "--config", f"{RECIPES}/sft/config.yaml",
        "--model_name_or_path", f"{village}/model", "--rollouts", f"{village}/rollouts.jsonl",
        "--output_dir", f"{out}/sft",
    )  # fmt: skip
    evaluation = [
        "mempo_trl.cli", "evaluate", "--config", f"{RECIPES}/evaluate.yaml",
        "--dataset_name", f"{village}/test.jsonl", "--corpus_path", f"{village}/corpus.jsonl",
        "--overwrite",
    ]  # fmt: skip
    seconds["evaluate_before"] = run(
        *evaluation, "--model_name_or_path", f"{out}/sft", "--output_dir", f"{out}/before"
    )
    seconds["train"] = run(
        "mempo_trl.cli", "train", "--config", f"{RECIPES}/mempo/config.yaml",
        "--model_name_or_path", f"{out}/sft", "--dataset_name", f"{village}/train.jsonl",
        "--corpus_path", f"{village}/corpus.jsonl", "--output_dir", f"{out}/mempo",
    )  # fmt: skip
    seconds["evaluate_after"] = run(
        *evaluation, "--model_name_or_path", f"{out}/mempo", "--output_dir", f"{out}/after"
    )

    seconds["view"] = sum(
        run("mempo_trl.cli", "view", f"{out}/{name}", "--output_file", f"{out}/{page}.html")
        for name, page in (("after", "evaluation"), ("mempo", "training"))
    )

    before, after = (
        json.loads((out / name / "evaluation.json").read_text())["results"]["all"] for name in ("before", "after")
    )
    summary = {
        "exact_match_before": before["exact_match"],
        "exact_match_after": after["exact_match"],
        "f1_before": before["f1"],
        "f1_after": after["f1"],
        "tokens_total_mean": after["tokens_total_mean"],
        "tokens_peak_mean": after["tokens_peak_mean"],
        "seconds": round(time.perf_counter() - start, 1),
        "seconds_by_step": {name: round(value, 1) for name, value in seconds.items()},
        "num_questions": after["num_rollouts"],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{'':16}{'cold start':>12}{'after MemPO':>13}")
    for label, name in (("exact match", "exact_match"), ("F1", "f1"), ("well formed", "format_ok_frac")):
        print(f"{label:16}{before[name]:>12.3f}{after[name]:>13.3f}")
    for label, name in (("tokens, total", "tokens_total_mean"), ("tokens, peak", "tokens_peak_mean")):
        print(f"{label:16}{before[name]:>12.0f}{after[name]:>13.0f}")
    print(f"\n{summary['num_questions']} held-out questions, {summary['seconds']:.0f} s in all. Figures: "
          f"{out}/summary.json.\nSee what the agent remembers, in a browser: {out}/evaluation.html, and how that came "
          f"about: {out}/training.html")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="out/quickstart")
    main(parser.parse_args().output_dir)
