"""Starter of the process that ships a refresh's ledger to MLflow (`shipper.py`).

Importing mlflow costs two CPU-seconds, and a call to a slow server may take any time; in a process of its own neither
delays a stage. Events are in the ledger first, so nothing is lost when MLflow, or that process, is away.
"""

from __future__ import annotations

import os
import subprocess
import sys

from flows.ledger.refreshes import Ledger

CLOSE_TIMEOUT_S = 30.0


class Tracker:
    """Shipping process of one refresh, best effort."""

    def __init__(self, ledger: Ledger):
        self._folder = ledger.folder
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def start(self, environment: dict[str, str]) -> None:
        """Start the process; it ends after `close`, or when this process has died.

        environment: where MLflow is, added to the process's own.
        """
        self._environment = environment
        with (self._folder / "tracking.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.tracking.shipper", str(self._folder)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must stop the refresh only, whose end is then shipped
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the process ship the rest and end; what it does not finish, the next refresh ships.

        A process that was killed meanwhile is replaced first.
        """
        if self._process and self._process.poll():
            self.start(self._environment)
        if self._process and self._process.stdin:
            self._process.stdin.close()  # by its end the shipper sees that the refresh is over
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
