"""Observer of a running stage: it writes events to the ledger (event log) of the refresh, and milestones to the log."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from flows.ledger.events import AnyEvent, AttemptBegan, Outcome, StageWaits
from flows.ledger.machine import energy_j
from flows.ledger.record import AttemptRecord, RefreshRecord
from flows.ledger.refreshes import end_of
from flows.planning.devices import num_devices, own_gpus
from flows.running.runner import Attempt, AttemptEnd
from flows.tracking.labels import params_of, tags_of
from stages.core.contract import StageResult
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.core.metric_series import metrics_size
from stages.core.redaction import redact

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]
LOG_LEVELS = {"milestone": logging.INFO, "warning": logging.WARNING}


class StageObserver:
    """Observer that records one stage's events in the refresh's ledger, and logs its milestones and warnings.

    is_retried: decides whether the stage is tried again after an error. waited_until_s: monotonic time until which
    another refresh was building the same artifact, if one was.
    """

    def __init__(
        self,
        stage: str,
        refresh: RefreshRecord,
        append: Callable[[AnyEvent], None],
        log: Log,
        is_retried: Callable[[BaseException], bool],
    ):
        self._stage = stage
        self._refresh = refresh
        self._append = append
        self._log = log
        self._is_retried = is_retried
        self._attempt: AttemptRecord | None = None
        self._events = Tail(Path())
        self._gpus: list[int] = []
        self._energy_before_j: float | None = None
        self.waited_until_s: float | None = None

    def waiting(self) -> None:
        is_news, self.waited_until_s = self.waited_until_s is None, time.monotonic()
        if not is_news:
            return
        self._append(StageWaits(stage=self._stage, reason="another refresh, which builds the same"))
        self._log.info("waiting: another refresh is building the same artifact")

    def started(self, attempt: Attempt) -> str:
        began = AttemptBegan(
            stage=self._stage,
            number=attempt.number,
            work=attempt.work,
            first_byte=metrics_size(attempt.work),
            num_devices=num_devices(attempt.planned.config),
            params=params_of(attempt.planned),
            tags={
                **tags_of(attempt.planned),
                "refresh": self._refresh.refresh,
                "attempt": str(attempt.number),
                "resumed": str(attempt.resumed).lower(),
                "hardware": self._refresh.hardware,
                "git_commit": self._refresh.git_commit or "unknown",
            },
        )
        self._attempt = AttemptRecord(began)
        self._append(began)
        self._gpus = own_gpus(attempt.planned.config)
        self._energy_before_j = energy_j(self._gpus)
        self._events.close()
        # Earlier attempts have logged what is in it already.
        self._events = Tail(attempt.work / "events.jsonl", at_end=True)
        if attempt.resumed:
            self._log.info("resuming from an earlier attempt's checkpoint")
        return self._refresh.key_of(self._stage, attempt.number)

    def tick(self) -> None:
        for event in self._events.rows():
            level = LOG_LEVELS.get(event.get("event", ""))
            if level is not None:
                self._log.log(level, event.get("message", ""))

    def ended(self, end: AttemptEnd) -> None:
        assert self._attempt
        self._events.close()
        result = end.result or StageResult()
        # Decided before the end is recorded: the decision may add to the error's message why it is not tried again.
        is_retried = end.error is not None and self._is_retried(end.error)
        self._append(
            end_of(
                self._attempt,
                _in_a_word(end),
                folder=end.folder,
                seconds=end.seconds,
                metrics=result.metrics,
                tags=result.tags,
                files=tuple(result.files),
                error=describe(end.error) if end.error else None,
                error_class=type(end.error).__name__ if end.error else None,
                energy_j=self._energy_used_j(),
                retried=is_retried,
            )
        )

    def _energy_used_j(self) -> float | None:
        after_j = energy_j(self._gpus)
        return None if after_j is None or self._energy_before_j is None else after_j - self._energy_before_j


def _in_a_word(end: AttemptEnd) -> Outcome:
    if end.result:
        return "finished"
    if isinstance(end.error, RefreshStoppedError | KeyboardInterrupt):
        return "cancelled"
    return "killed" if isinstance(end.error, LifecycleError) and end.error.died else "failed"


def describe(error: BaseException) -> str:
    """Return an error's message; for an unexpected error, with its class in front."""
    return str(error) if isinstance(error, LifecycleError) else redact(f"{type(error).__name__}: {error}")


class Tail:
    """Reader of a growing JSON-lines file, such as a stage's events, which need not exist yet; returns complete lines.

    It keeps the file open, to read the last lines of one that was moved or removed since, as a stage's are at its end.
    Then it goes on with the file that took the place, such as that of the program which registers a promoted model.
    """

    def __init__(self, path: Path, at_end: bool = False):
        self.path = path
        self._stream: BinaryIO | None = None
        if at_end and path.exists():
            self._stream = path.open("rb")
            self._stream.seek(0, os.SEEK_END)

    def rows(self) -> list[dict[str, Any]]:
        """Return the JSON objects appended to the file since the last call, without lines cut off by a crash."""
        rows = self._appended()
        if self._stream and self._is_replaced(self._stream):
            self.close()
            rows += self._appended()
        return rows

    def close(self) -> None:
        if self._stream:
            self._stream.close()
            self._stream = None

    def _appended(self) -> list[dict[str, Any]]:
        if self._stream is None:
            try:
                self._stream = self.path.open("rb")
            except OSError:
                return []
        begin = self._stream.tell()
        data = self._stream.read()
        # b'{"a": 1}\n{"b"' -> b'{"a": 1}\n'; the rest is read again when its line has an end.
        complete = data[: data.rfind(b"\n") + 1]
        self._stream.seek(begin + len(complete))
        return [row for line in complete.splitlines() if (row := _parse(line)) is not None]

    def _is_replaced(self, stream: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(stream.fileno()), self.path.stat())
        except OSError:
            return False


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:  # a crash has torn it
        return None
    return row
