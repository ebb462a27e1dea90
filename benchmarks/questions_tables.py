"""Figures and tables of `benchmarks/questions.py`."""

from collections.abc import Sequence

from learning_results import mean_or_none, rollouts_figures, training_rollouts
from tasks import Task

from mempo_trl.evaluation.comparison import compare_pairs, pair
from mempo_trl.evaluation.metrics import summarize
from mempo_trl.runner import read_records


FIGURES = {
    "exact match": "exact_match",
    "F1": "f1",
    "well formed": "format_ok_frac",
    "tokens, total": "tokens_total_mean",
    "tokens, peak": "tokens_peak_mean",
    "searches": "searches_mean",
}
DIFFERENCES = {
    "exact match": "exact_match",
    "F1": "f1",
    "tokens, total": "tokens_total",
    "tokens, peak": "tokens_peak",
}
TRAINING = ("exact_match", "f1", "groups_without_spread", "memory_reward", "memory_tokens", "turns", "searches")


def make_rows(
    evaluations: dict[tuple[str, str, int], Task], trainings: dict[str, Task]
) -> tuple[list[dict], list[dict], list[dict]]:
    """
    Figures of what is finished.

    Args:
        evaluations (`dict[tuple[str, str, int], Task]`):
            By model, context and number of objectives.
        trainings (`dict[str, Task]`):
            By arm.

    Returns:
        `tuple[list[dict], list[dict], list[dict]]`: A row per evaluation ([`summarize`]), per pair of evaluations
        ([`compare_pairs`], also of all numbers of objectives together), and per training (means over its steps).
    """
    played: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for (model, context, k), task in evaluations.items():
        if task.read_done() is not None:
            records = read_records(task.folder / "rollouts.jsonl")
            played.setdefault((model, context), {})[str(k)] = records
    rows = [
        {"model": model, "context": context, "objectives": k, **summarize(records)}
        for (model, context), by_objectives in played.items()
        for k, records in by_objectives.items()
    ]
    contexts = ("memory", "full")
    num_counts = len({k for _, _, k in evaluations})
    pairs = [(("cold_start", context), (arm, context)) for context in contexts for arm in trainings]
    pairs += [(("grpo", context), ("mempo", context)) for context in contexts]
    pairs += [((model, "full"), (model, "memory")) for model in ("cold_start", *trainings)]
    differences = []
    for one, other in pairs:
        sides = [dict(played.get(key, {})) for key in (one, other)]
        for side in sides:
            if len(side) == num_counts:
                side["all"] = [record for records in side.values() for record in records]
        for k in (k for k in sides[0] if k in sides[1]):
            row = {"second": " ".join(other), "first": " ".join(one), "objectives": k}
            differences.append(row | compare_pairs(pair(sides[0][k], sides[1][k])))
    trained = []
    for arm, task in trainings.items():
        if (done := task.read_done()) is not None:
            steps = [rollouts_figures(records) for records in training_rollouts(task.folder).values()]
            means = {name: mean_or_none(step[name] for step in steps) for name in TRAINING}
            trained.append(
                {"arm": arm, "steps": len(steps), **means, "seconds of a step": done["seconds"] / len(steps)}
            )
    return rows, differences, trained


def _number(value: float | None, interval: Sequence[float] | None = None, sign: str = "") -> str:
    if value is None:
        return ""
    largest = max(map(abs, (value, *(interval or ()))))
    digits = 0 if largest >= 100 else 1 if largest >= 10 else 3
    ends = "" if interval is None else f" ({interval[0]:{sign}.{digits}f} to {interval[1]:{sign}.{digits}f})"
    return f"{value:{sign}.{digits}f}{ends}"


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def make_tables(rows: list[dict], differences: list[dict], trainings: list[dict]) -> str:
    """What [`make_rows`] gave as Markdown; in brackets 95% intervals over questions."""
    held_out = [["model", "context", "objectives", "questions", *FIGURES]]
    for row in rows:
        cells = [_number(row[name], row["ci95"][name]) for name in FIGURES.values()]
        held_out.append([row["model"], row["context"], row["objectives"], str(row["num_questions"]), *cells])
    paired = [["second minus first", "objectives", "questions", *DIFFERENCES]]
    for row in differences:
        cells = []
        for figure in (row[name] for name in DIFFERENCES.values()):
            text = "" if figure is None else _number(figure["difference"], figure["ci95"], "+")
            cells.append(text and f"{text}, p {figure['p_sign_flip']:.2g}")
        name = f"{row['second']} minus {row['first']}"
        paired.append([name, row["objectives"], str(row["num_questions"]), *cells])
    trained = [["arm", "steps", *(name.replace("_", " ") for name in TRAINING), "seconds of a step"]]
    for row in trainings:
        trained.append([row["arm"], str(row["steps"]), *(_number(value) for value in list(row.values())[2:])])
    titles = {
        "Held out (in brackets 95% bootstrap intervals over questions)": held_out,
        "Differences on the same questions (p of a sign-flip test)": paired,
        "Training (means over the sampled rollouts of all steps)": trained,
    }
    return "\n\n".join(f"## {title}\n\n{_table(table)}" for title, table in titles.items()) + "\n"
