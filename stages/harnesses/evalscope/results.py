"""What EvalScope leaves → scores and samples in the schema of all harnesses.

In, for each task: `reviews/MODEL/BENCHMARK_SUBSET.jsonl`, a sample each, and `reports/MODEL/BENCHMARK.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import EvaluationError
from stages.core.files import read_json_lines
from stages.harnesses.harness import Evaluation, Results

USABLE = ("success", "fallback")
SUBSET_SIZE = 1_000_000
"""Documents are numbered by subset, each from a multiple of this on: a `limit` does not change their numbers."""


def read_results(folders: Mapping[str, Path], evaluation: Evaluation) -> Results:
    """Raises EvaluationError for a task without samples, and for samples that EvalScope could not score."""
    samples = {task: list(_rows(task, folder)) for task, folder in folders.items()}
    reports = {task: _report(task, folder) for task, folder in folders.items()}
    generation = evaluation.generation.model_dump(mode="json")
    own_shots = "the benchmark's own" if evaluation.num_fewshot is None else evaluation.num_fewshot
    scores = {
        "results": {task: _scores(rows, reports[task]) for task, rows in samples.items()},
        "configs": {task: {"generation_kwargs": generation} for task in folders},
        "versions": dict.fromkeys(folders, f"EvalScope, as user of a chat, seed {evaluation.seed}"),
        "n-shot": dict.fromkeys(folders, own_shots),
        "higher_is_better": {task: _directions(report) for task, report in reports.items()},
    }
    return Results(scores, samples)


def _rows(task: str, folder: Path) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("reviews/*/*.jsonl"))
    if not any(file.stat().st_size for file in files):
        raise EvaluationError(f"EvalScope gave no samples for {task}; see evalscope.log")
    for subset, file in enumerate(files):
        for review in sorted(read_json_lines(file), key=lambda one: int(one["index"])):
            yield _row(task, subset * SUBSET_SIZE + int(review["index"]), review)


def _row(task: str, number: int, review: Mapping[str, Any]) -> dict[str, Any]:
    """One sample. Raises EvaluationError where its metric failed: a failure is no score of 0."""
    score = review["sample_score"]["score"]
    if score["status"] not in USABLE or not score["value"]:
        why = "; ".join(f"{name}: {value}" for name, value in (score["metadata"] or {}).items())
        raise EvaluationError(f"EvalScope could not score sample {number} of {task} ({score['status']}): {why}")
    asked = [(one["role"], one["content"]) for one in review["messages"] if one.get("source") != "generate"]
    hashed = {"doc": [asked, review["target"]], "prompt": asked, "target": review["target"]}
    return {
        "doc_id": number,
        "filter": "none",
        "doc": {"messages": asked, "target": review["target"]},
        "resps": [[score["prediction"]]],
        "filtered_resps": [score["extracted_prediction"]],
        **{f"{name}_hash": hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in hashed.items()},
        **{name: float(value) for name, value in score["value"].items()},
    }


def _report(task: str, folder: Path) -> dict[str, Any]:
    for file in folder.glob("reports/*/*.json"):
        report: dict[str, Any] = json.loads(file.read_bytes())
        return report
    raise EvaluationError(f"EvalScope wrote no report of {task}; see evalscope.log")


def _scores(rows: list[dict[str, Any]], report: Mapping[str, Any]) -> dict[str, float]:
    """Means over samples with their standard errors s / √n; of what EvalScope aggregates otherwise, its own number."""
    found: dict[str, float] = {}
    for metric in report["metrics"]:
        name = _metric_name(metric)
        values = [row[name] for row in rows if name in row]
        found[f"{name},none"] = statistics.fmean(values) if values else float(metric["score"])
        if len(values) > 1:
            found[f"{name}_stderr,none"] = statistics.stdev(values) / math.sqrt(len(values))
    return found


def _directions(report: Mapping[str, Any]) -> dict[str, bool]:
    return {_metric_name(one): one["semantics"].get("direction") != "lower_is_better" for one in report["metrics"]}


def _metric_name(metric: Mapping[str, Any]) -> str:
    """Only a mean bears the name of what samples have."""
    name, aggregation = metric["identity"]["name"], metric["identity"]["aggregation"]
    return str(name if aggregation == "mean" else f"{name}_{aggregation}")
