"""Observer of one stage of a refresh: writes what happens where tracking and views find it, logs milestones."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.ledger.history import AttemptRecord, RefreshFolder, RefreshRecord, end_attempt, metrics_size, now_ms
from flows.running.runner import Attempt, Outcome
from flows.tracking.labels import params_of, tags_of
from flows.tracking.tracker import Tracker
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.core.redaction import redact

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]
LOG_LEVELS = {"milestone": logging.INFO, "warning": logging.WARNING}


class StageObserver:
    """An `Observer`. `update` changes the stage's entry in the refresh's record."""

    def __init__(
        self,
        record: RefreshRecord,
        folder: RefreshFolder,
        tracker: Tracker,
        log: Log,
        update: Callable[..., None],
    ):
        self._record = record
        self._folder = folder
        self._tracker = tracker
        self._log = log
        self._update = update
        self._attempt: AttemptRecord | None = None
        self._events = Tail(Path())

    def waiting(self) -> None:
        self._update(state="waiting", reason="another refresh is building the same artifact")
        self._log.info("waiting: another refresh is building the same artifact")

    def started(self, attempt: Attempt) -> None:
        self._attempt = self._begin(attempt)
        self._folder.write_attempt(self._attempt)
        self._events = Tail(attempt.work / "events.jsonl", at_end=True)
        self._update(state="running", work=attempt.work)
        if attempt.resumed:
            self._log.info("resuming from an earlier attempt's checkpoint")

    def mlflow_run_id(self) -> str | None:
        assert self._attempt
        run_id = self._tracker.run_id(self._attempt.key)
        self._update(mlflow_run_id=run_id)
        return run_id

    def tick(self) -> None:
        for event in self._events.rows():
            level = LOG_LEVELS.get(event.get("event", ""))
            if level is not None:
                self._log.log(level, event.get("message", ""))

    def ended(self, outcome: Outcome) -> None:
        assert self._attempt
        if outcome.result:
            ended = end_attempt(
                self._attempt,
                "finished",
                folder=outcome.folder,
                metrics={**outcome.result.metrics, "stage_time_s": outcome.seconds},
                tags=outcome.result.tags,
                files=tuple(outcome.result.files),
            )
        else:
            stopped = isinstance(outcome.error, RefreshStoppedError | KeyboardInterrupt)
            ended = end_attempt(self._attempt, "killed" if stopped else "failed", error=describe(outcome.error))
        self._folder.write_attempt(ended)

    def _begin(self, attempt: Attempt) -> AttemptRecord:
        return AttemptRecord(
            stage=attempt.planned.name,
            number=attempt.number,
            work=attempt.work,
            started_ms=now_ms(),
            first_byte=metrics_size(attempt.work),
            params=params_of(attempt.planned),
            tags={
                **tags_of(attempt.planned),
                "refresh": self._record.refresh,
                "attempt": str(attempt.number),
                "resumed": str(attempt.resumed).lower(),
                "hardware": self._record.hardware,
                "git_commit": self._record.git_commit or "unknown",
            },
        )


def describe(error: BaseException | None) -> str:
    """Message of an expected error; class and message of any other."""
    return str(error) if isinstance(error, LifecycleError) else redact(f"{type(error).__name__}: {error}")


class Tail:
    """Reads the complete lines of a JSON-lines file as they are appended. The file need not exist yet."""

    def __init__(self, path: Path, at_end: bool = False):
        self.path = path
        self._position = path.stat().st_size if at_end and path.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        """What was appended since the last call; lines that are no JSON object are left out."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return [row for line in complete.splitlines() if (row := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
