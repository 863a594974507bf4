"""Where the samples of an evaluation lie in its artifact: `samples/TASK.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.core.files import read_json_lines


def samples_file(evaluation: Path, task: str) -> Path:
    """A task's file; the names of some tasks hold a slash."""
    return evaluation / "samples" / f"{task.replace('/', '_')}.jsonl"


def read_samples(evaluation: Path, task: str) -> list[dict[str, Any]]:
    """The rows of a task, as `stages/harnesses/harness.py` says. Raises OSError or ValueError for a file without."""
    return read_json_lines(samples_file(evaluation, task))
