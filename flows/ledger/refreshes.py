"""Event logs (ledgers) of all refreshes in the lifecycle home: append-only files that need no server.

<home>/ledger/<refresh>/
    ledger.jsonl    an event a line, append-only: written by the refresh's process, or by another one once that died
    heartbeat       touched every 30 s while the refresh runs, for processes that cannot see its process
    mlflow.json     how much of it has reached MLflow; written by `flows/tracking/shipper.py` only
    tracking.log    output of the shipper; shipping.lock: held by the running shipper
    trials/0-1/     of a comparison: work folder of the first layout's first round
    report.html     of a refresh that has ended, for people
    comparison.json, note.md    of a finished comparison, for programs and MLflow's page

Prefect, MLflow, views and commands read from here what happened; they never need anything that is not here.
"""

import errno
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from flows.ledger.events import ANY_EVENT, AnyEvent, AttemptEnded, Outcome, RefreshBegan, RefreshKilled
from flows.ledger.home import ledger_root
from flows.ledger.record import LEDGER_FILE, AttemptRecord, RefreshRecord, fold
from stages.core.errors import StoreError, full_disk_named
from stages.core.fields import what_is_wrong
from stages.core.files import write_atomically
from stages.core.lines import say
from stages.core.metric_series import metrics_size

REPORT_FILE, ROWS_FILE, NOTE_FILE = "report.html", "comparison.json", "note.md"
LONGEST_END = 65_536
"""Bytes to read from the end of an event log to find its last event. A longer event only takes more time."""
TORN = "json_invalid"
"""pydantic's error type for text that is no JSON, by which lines cut off by a crash are recognised."""


class Ledger:
    """Event log (ledger) of one refresh, an append-only file that exists from the first event on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / LEDGER_FILE

    def exists(self) -> bool:
        return self.file.exists()

    def size(self) -> int:
        """Return the size of the event log in bytes, which grows with every event."""
        return self.file.stat().st_size

    def is_over(self) -> bool:
        """Return whether the log ends with the end of the refresh; False if another process closed it."""
        return b'"event":"refresh_ended"' in self._last_line()

    def ends_waiting(self) -> bool:
        """Return whether the log ends with the end of a refresh that waits for a person's approval."""
        return self.is_over() and b'"state":"waiting_for_approval"' in self._last_line()

    def _last_line(self) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(max(0, self.size() - LONGEST_END))
            end = stream.read()
        # A last line without an end was torn by a crash.
        return end.splitlines()[-1] if end.endswith(b"\n") else b""

    def append(self, event: AnyEvent) -> None:
        """Append one event to the log, durably: it is on the disk on return. Raises `ResourceError` on a full disk."""
        line = event.model_dump_json() + "\n"
        with full_disk_named("recording the refresh", self.file):
            if not self.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                # A ledger exists with its first event, or not at all.
                write_atomically(self.file, line)
                return
            # Unbuffered, so that the event is one write: another process may append at the same time.
            with self.file.open("a+b", buffering=0) as stream:
                # A crash or a full disk may have torn the last line: then this event begins a line of its own.
                stream.seek(-1, os.SEEK_END)
                data = (line if stream.read(1) == b"\n" else f"\n{line}").encode()
                if stream.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(stream.fileno())

    def events(self) -> Iterator[AnyEvent]:
        """Yield all events of the log, oldest first, without lines that a crash or a full disk cut off.

        Raises `StoreError` when the file cannot be read, or holds an event that this version does not know.
        """
        try:
            # Of bytes: lines of text would also end at U+2028, which JSON writes as it is.
            lines = self.file.read_bytes().splitlines()
            for line in lines:
                try:
                    yield ANY_EVENT.validate_json(line)
                except ValidationError as error:
                    if error.errors()[0]["type"] != TORN:
                        raise
        except (OSError, ValidationError) as error:
            raise StoreError(f"reading the ledger of refresh {self.folder.name}: {what_is_wrong(error)}") from error

    def read(self) -> RefreshRecord:
        """Return the state of the refresh after all its events. Raises `StoreError` for a damaged or unreadable log."""
        events = [*self.events()]
        if not events or not isinstance(events[0], RefreshBegan):
            raise StoreError(f"reading the ledger of refresh {self.folder.name}: its first event is missing")
        return fold(events)


REFRESH_ID = re.compile(r".+-\d{8}-\d{6}-[0-9a-f]{4}")
"""Form of a refresh's id, whole, as `new_refresh_id` makes it."""


def new_refresh_id(recipe: str) -> str:
    """Return a sortable, readable and unique id for a new refresh, such as quickstart-20261121-084512-3f2a."""
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def ledger_of(refresh: str) -> Ledger:
    """Return the event log of a refresh by its id; the file need not exist."""
    return Ledger(ledger_root() / refresh)


def ledgers() -> Iterator[Ledger]:
    """Yield the event logs of all refreshes, the most recently written first."""
    written_ns: dict[Path, int] = {}
    for file in ledger_root().glob(f"*/{LEDGER_FILE}"):
        with suppress(FileNotFoundError):  # removed meanwhile, by the retention policy
            written_ns[file] = file.stat().st_mtime_ns
    for file in sorted(written_ns, key=written_ns.__getitem__, reverse=True):
        yield Ledger(file.parent)


def was_run_here(recipe: Path) -> bool:
    """Return whether a recipe file was ever refreshed in this lifecycle home. recipe: absolute path of the file."""
    begun = (event for ledger in ledgers() for event in islice(ledger.events(), 1))
    return any(isinstance(event, RefreshBegan) and event.recipe_path == recipe for event in begun)


class RunningRefreshes:
    """Finder of refreshes recorded as running, which reads only event logs that have grown since the last call.

    A damaged ledger is named on stderr once; it must not keep other refreshes from being closed.
    """

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}

    def all(self) -> Iterator[RefreshRecord]:
        """Yield the states of refreshes recorded as running, including those whose process has died."""
        for ledger in ledgers():
            try:
                size = ledger.size()
                # It was over when last read; a retry would have made it longer.
                if self._ended.get(ledger.folder.name) == size:
                    continue
                record = None if ledger.is_over() else ledger.read()
            except FileNotFoundError:  # removed meanwhile: it was over
                continue
            except StoreError as error:
                say(f"warning: passing over a refresh: {str(error).splitlines()[0]}", sys.stderr)
                record = None
            if record and record.state == "running":
                yield record
            else:
                self._ended[ledger.folder.name] = size

    def of(self, recipe: str) -> list[RefreshRecord]:
        """Return a recipe's running refreshes, without layout comparisons, which hold all slots, and dead ones."""
        records = [record for record in self.all() if record.recipe == recipe and not record.comparison]
        return [record for record in records if not record.interrupted]


def close_interrupted() -> list[str]:
    """Record the failure of all refreshes whose process died without recording an end; return their ids.

    In a copied home, also of those that run in the original. Call it before another attempt appends to the
    `metrics.jsonl` of the same work folder: it records where the dead attempt's part ends.
    """
    closed = []
    for record in RunningRefreshes().all():
        if record.interrupted:
            ledger = ledger_of(record.refresh)
            # Attempts first: after a crash in between, the refresh still counts as running and is closed again.
            for attempt in record.attempts.values():
                if attempt.ended is None:
                    error = record.unsaid_end if record.is_copied else "the refresh was killed"
                    ledger.append(end_of(attempt, "killed", error=error))
            ledger.append(RefreshKilled(process=record.process, copied=record.is_copied))
            closed.append(record.refresh)
    return closed


def end_of(attempt: AttemptRecord, outcome: Outcome, **fields: object) -> AttemptEnded:
    """Return the end event of an attempt, with its files in the work folder unless `folder` names another."""
    began = attempt.began
    fields = {"folder": began.work, **fields}
    folder = fields["folder"]
    assert isinstance(folder, Path)
    return AttemptEnded(
        stage=began.stage, number=began.number, outcome=outcome, last_byte=metrics_size(folder), **fields
    )
