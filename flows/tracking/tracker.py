"""The refresh's side of tracking: starts the process that tells MLflow (`shipper.py`) and asks how far it is.

Importing mlflow costs two CPU-seconds and a call to a slow server may take any time; in a process of its own neither
delays a stage. The two share the refresh's folder: what happened is written there first, so that nothing is lost when
MLflow, or that process, is away.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from flows.ledger.history import RefreshFolder, Shipped

RUN_ID_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0


class Tracker:
    """Tells MLflow of one refresh, best effort."""

    def __init__(self, folder: RefreshFolder):
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str]) -> None:
        """Start the process; it ends by itself once `close` was called, or when this process has died.

        environment: where MLflow is, added to the process's own.
        """
        with (self.folder.path / "tracking.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.tracking.shipper", str(self.folder.path)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the refresh, which then has a last word to be shipped
            )

    def run_id(self, attempt: str) -> str | None:
        """The MLflow run of an attempt; waits for it a few seconds, unless MLflow is known to be away."""
        end = time.monotonic() + RUN_ID_TIMEOUT_S
        while self._process and self._process.poll() is None and time.monotonic() < end:
            shipped = self.folder.read_shipped()
            if attempt in shipped.attempts:
                return shipped.attempts[attempt].run_id
            if shipped.trouble:
                return None
            time.sleep(0.05)
        return None

    def page(self) -> str | None:
        """Address of the refresh's page in MLflow, when that is a server and knows of it."""
        shipped = self.folder.read_shipped()
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri.startswith("http") or not shipped.parent_run_id:
            return None
        return f"{uri.rstrip('/')}/#/experiments/{shipped.experiment_id}/runs/{shipped.parent_run_id}"

    def close(self) -> Shipped:
        """Let the process ship the rest and end; what it does not manage, the next refresh ships."""
        if self._process and self._process.stdin:
            self._process.stdin.close()
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        return self.folder.read_shipped()
