"""The comparison's side of tracking: starts `comparison_shipper.py` once a comparison is over, and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys

from flows.compare.record import ComparisonFolder, ShippedComparison
from flows.tracking.cursor import RUN_LINK

TIMEOUT_S = 120.0


def ship(folder: ComparisonFolder) -> ShippedComparison | None:
    """Tell MLflow; None when it did not work, for which `tracking.log` has the reason: the next comparison ships it."""
    with (folder.path / "tracking.log").open("ab") as log:
        command = [sys.executable, "-m", "flows.tracking.comparison_shipper"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(TIMEOUT_S)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return folder.read_shipped()


def page(shipped: ShippedComparison) -> str | None:
    """Address of the parent run's page, when MLflow is a server."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    link = RUN_LINK.format(experiment=shipped.experiment_id, run=shipped.parent_run_id)
    return f"{uri.rstrip('/')}/{link}" if uri.startswith("http") else None
