"""Program that copies the metrics of a refresh to a tracker beside MLflow, and what that lacks of earlier refreshes.

python -m flows.tracking.copies TRACKER LEDGER_FOLDER

It copies until stdin ends (the refresh ended, or died), then the rest. Each attempt at a stage is a run of its own, in
a folder of the lifecycle home: `trackers/TRACKER/REFRESH/ATTEMPT`. A run that an earlier process left unfinished is
written from its beginning, so that it has each value once. `copied-TRACKER.json`, beside the ledger, lists the runs
that are complete.
"""

import os
import select
import shutil
import signal
import sys
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

from flows.ledger.home import home
from flows.ledger.record import AttemptRecord
from flows.ledger.refreshes import Ledger, ledgers
from flows.tracking.rows import final_rows, rows_of
from flows.tracking.shipper import folder_of
from flows.tracking.writers import WRITERS, Writer
from stages.core.contract import StrictModel
from stages.core.errors import StoreError
from stages.core.files import write_atomically
from stages.core.garbage import collect_rarely
from stages.core.metric_series import MetricSeries, last_steps
from stages.core.redaction import redact, shortened

INTERVAL_S = 1.0
LATEST = 30
"""Number of latest refreshes that are completed if the tracker lacks a part of them."""
LONGEST_TROUBLE = 300
LONGEST_END_S = 600
"""Seconds after the end of a refresh in which this process must have copied the rest."""


class Copied(StrictModel):
    """Contents of `copied-TRACKER.json`: attempts whose runs are complete. trouble: why others are not, if known."""

    attempts: tuple[str, ...] = ()
    trouble: str | None = None


def copied_file(ledger_folder: Path, tracker: str) -> Path:
    """Return the file that says what a tracker has of a refresh."""
    return ledger_folder / f"copied-{tracker}.json"


def runs_folder() -> Path:
    """Return the folder of the home in which each tracker has a folder of runs by refresh."""
    return home() / "trackers"


class Copier:
    """Copier of one refresh's attempts to one tracker."""

    def __init__(self, ledger: Ledger, tracker: str):
        self._ledger = ledger
        self._tracker = tracker
        self._file = copied_file(ledger.folder, tracker)
        self._copied = Copied.read_or_none(self._file) or Copied()
        self._open: dict[str, tuple[Writer, MetricSeries]] = {}

    def copy(self) -> None:
        """Copy what attempts have logged since the last call. Raises whatever the tracker does."""
        record = self._ledger.read()
        for attempt in record.attempts.values():
            if attempt.name not in self._copied.attempts:
                self._copy_attempt(record.recipe, attempt)
        if self._copied.trouble:
            self._note(trouble=None)

    def note_trouble(self, error: BaseException) -> None:
        """Record why the tracker lacks a part of the refresh."""
        self._note(trouble=shortened(redact(f"{type(error).__name__}: {error}"), LONGEST_TROUBLE))

    def _copy_attempt(self, recipe: str, attempt: AttemptRecord) -> None:
        writer, series = self._open.get(attempt.name) or self._begin(recipe, attempt)
        folder = folder_of(attempt)
        # The artifact has taken the place of the work folder, and the end is known, once the attempt is over.
        series = MetricSeries(folder, series.position, attempt.last_byte, series.last_steps)
        for logged in series.steps():
            writer.log(rows_of(logged))
        self._open[attempt.name] = writer, series
        if attempt.ended:
            writer.log(final_rows(attempt.metrics, folder, attempt.last_byte, attempt.ended.time_ms))
            writer.finish()
            del self._open[attempt.name]
            self._note(attempts=(*self._copied.attempts, attempt.name))

    def _begin(self, recipe: str, attempt: AttemptRecord) -> tuple[Writer, MetricSeries]:
        refresh = self._ledger.folder.name
        folder = runs_folder() / self._tracker / refresh / attempt.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = {**attempt.began.params, "kind": attempt.tags.get("kind", ""), "recipe": recipe}
        writer = WRITERS[self._tracker](folder, refresh, attempt.name, config)
        # Steps that an earlier attempt has logged, too, are in its own run.
        first_byte = attempt.began.first_byte
        return writer, MetricSeries(folder_of(attempt), first_byte, None, last_steps(folder_of(attempt), first_byte))

    def _note(self, **changes: object) -> None:
        self._copied = self._copied.model_copy(update=changes)
        write_atomically(self._file, self._copied.model_dump_json())


def main() -> None:
    """Copy a ledger (folder: second argument) to the tracker (first) until stdin ends, then the rest of others."""
    collect_rarely()
    tracker, ledger = sys.argv[1], Ledger(Path(sys.argv[2]))
    copier = Copier(ledger, tracker)
    try:
        if tracker not in WRITERS:
            raise ValueError(f"there is no tracker {tracker!r}; expected {', '.join(WRITERS)}")
        with _lock(ledger, tracker):
            while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                copier.copy()
            # A refresh that died waits for no tracker that hangs, and none may stay forever.
            signal.alarm(LONGEST_END_S)
            copier.copy()
        _complete_others(ledger, tracker)
    except Exception as error:
        # Whatever a tracker raises, the refresh goes on; the next one tries again.
        copier.note_trouble(error)
        os._exit(1)  # threads of a tracker in trouble must not keep the process


def _complete_others(own: Ledger, tracker: str) -> None:
    for ledger in islice(ledgers(), LATEST):
        if ledger.folder == own.folder:
            continue
        try:
            record = ledger.read()
            copied = Copied.read_or_none(copied_file(ledger.folder, tracker))
            # Refreshes from before the tracker was asked for stay out of it.
            if copied and record.state != "running" and record.attempts.keys() - set(copied.attempts):
                with _lock(ledger, tracker).acquire(blocking=False):
                    Copier(ledger, tracker).copy()
        except (StoreError, Timeout):
            continue


def _lock(ledger: Ledger, tracker: str) -> FileLock:
    return FileLock(ledger.folder / f"copying-{tracker}.lock", fallback_to_soft=False)


if __name__ == "__main__":
    main()
