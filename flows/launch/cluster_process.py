"""A stage that runs on a cluster, as its launcher's caller sees it: a local process that follows the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from flows.launch import local
from flows.launch.job_folder import JobFolder
from flows.store.content import LOG_FILE
from stages.core.errors import LifecycleError
from stages.core.supervised import Supervised


class ClusterProcess:
    """The program that follows the job (the agent) under the supervisor. It cancels the job when it is ended.

    Should it be killed, this process cancels the job in its place; should all be killed, the job misses its heartbeat.
    """

    def __init__(self, work: Path, cancel: Callable[[Path], None], grace_s: float) -> None:
        """cancel: ends the jobs of a work folder. grace_s: what that may take."""
        self._work = work
        self._cancel = cancel
        environment = {**os.environ, "PYTHONPATH": str(local.code_folder()), "PYTHONUNBUFFERED": "1"}
        with (work / LOG_FILE).open("ab") as log:
            command = [sys.executable, "-m", "flows.launch.agent", str(work)]
            self._agent = Supervised(command, environment=environment, output=log, grace_s=grace_s)
        self.token = self._agent.token
        self._is_over = False

    def poll(self) -> int | None:
        """Exit code, or None while the stage waits or runs."""
        code = self._agent.poll()
        if code is not None:
            self._cancel_once()
        return code

    def stop(self) -> None:
        """Cancel the job; returns when nothing is left."""
        self._agent.stop()
        self._cancel_once()

    def _cancel_once(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            self._cancel(self._work)
        except LifecycleError as error:
            JobFolder.of(self._work).report("warning", f"a job may be left in the cluster, and ends itself: {error}")
