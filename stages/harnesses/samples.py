"""Where the samples of an evaluation lie in its artifact: `samples/TASK.jsonl`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.core.files import read_json_lines
from stages.harnesses.scores import score_metrics


def samples_file(evaluation: Path, task: str) -> Path:
    """A task's file; the names of some tasks hold a slash."""
    return evaluation / "samples" / f"{task.replace('/', '_')}.jsonl"


def samples_by_score(evaluation: Path) -> dict[str, int]:
    """Return score name (as in the metrics of the stage) → number of samples, of scores that are known to have some."""
    try:
        scores = json.loads((evaluation / "scores.json").read_bytes())
    except (OSError, ValueError):
        return {}
    found: dict[str, int] = {}
    for task, results in scores["results"].items():
        if num_samples := _num_samples(evaluation, scores, task):
            found |= dict.fromkeys(score_metrics({task: results}), num_samples)
    return found


def _num_samples(evaluation: Path, scores: dict[str, Any], task: str) -> int | None:
    """Documents, not rows: a task has a row for each filter of a document. None for a group, which has no samples."""
    if counted := scores.get("n-samples", {}).get(task):
        return int(counted["effective"])
    with suppress(OSError, ValueError, KeyError):
        return len({row["doc_id"] for row in read_samples(evaluation, task)})
    return None


def read_samples(evaluation: Path, task: str) -> list[dict[str, Any]]:
    """The rows of a task, as `stages/harnesses/harness.py` says. Raises OSError or ValueError for a file without."""
    return read_json_lines(samples_file(evaluation, task))
