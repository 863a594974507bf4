"""What `tests/benchmarks/gpu.py` measured on a machine without MLflow → runs as MLflow would have logged them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from flows.tracking.logged_runs import LoggedRun
from stages.core.errors import RecipeError
from stages.parallel.layout import EngineName


def measured_runs(file: Path) -> list[LoggedRun]:
    """The rows of this JSON file that one of our engines was measured in, in their order.

    Raises RecipeError when the file is not what that program writes.
    """
    try:
        rows = [row for row in json.loads(file.read_text()) if row["status"] == "measured"]
        runs = [
            LoggedRun(
                run_id=row["name"],
                name=row["name"],
                status="FINISHED",
                params=row["params"],
                metrics={name: value for name, value in row["metrics"].items() if value is not None},
                tags={**row["tags"], "hardware": row["tags"]["device_name"]},
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"reading measurements from {file}: {type(error).__name__}: {error}; expected the gpu.json that "
            "tests/benchmarks/gpu.py writes"
        ) from error
    return [run for run in runs if run.params["engine"] in get_args(EngineName)]
