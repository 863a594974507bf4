"""Program that copies the ledgers (event logs) of refreshes to MLflow while they run, and the code that starts it.

python -m flows.tracking.shipper LEDGER_FOLDER

It ships until stdin ends (the refresh ended, or died), then the rest of this refresh, and of earlier ones for which
MLflow was away. `mlflow.json` records the progress after every batch. If this process dies in between, MLflow drops
what it has already (equal run, key, step, time and value).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from flows.ledger.home import store_root
from flows.ledger.record import AttemptRecord, RefreshRecord
from flows.ledger.refreshes import NOTE_FILE, REPORT_FILE, ROWS_FILE, Ledger, ledgers
from flows.servers.programs import MLFLOW, uses_mlflow
from flows.servers.records import address_of
from flows.tracking.cursor import LAYOUTS, ShippedAttempt, read_shipped, run_id_of, write_shipped
from flows.tracking.datasets import datasets_read, tasks_read
from flows.tracking.pages import EXPERIMENT_TAGS, UNFOLDED
from flows.tracking.rows import (
    MetricRow,
    acceptable,
    batches,
    final_rows,
    how_measured,
    layout_tags,
    note,
    parent_params,
    parent_tags,
    score_tags,
    scores_text,
    stage_rows,
    stage_tags,
    trial_rows,
)
from flows.tracking.spans import send_missing_spans
from flows.tracking.writing import LONGEST_VALUE, log_datasets, log_files, log_metrics, log_params, set_tags
from stages.core.errors import StoreError
from stages.core.files import read_json_object
from stages.core.garbage import collect_rarely
from stages.core.lines import say
from stages.core.metric_series import MetricSeries, last_steps
from stages.core.redaction import redact, shortened
from stages.kinds.registry import makes

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "llm-lifecycle"
INTERVAL_S = 0.5
RETRY_INTERVAL_S = 5.0
LONGEST_TROUBLE = 300
CLIENT_ENVIRONMENT = {
    # A server that is away must be noticed within seconds; we retry ourselves.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
RUN_STATUS = {
    **dict.fromkeys(("completed", "not_promoted", "waiting_for_approval"), "FINISHED"),
    **{"failed": "FAILED", "cancelled": "KILLED"},
}
ATTEMPT_STATUS = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "killed": "KILLED"}
CLOSE_TIMEOUT_S = 30.0
OTHERS_VARIABLE = "LIFECYCLE_TRACKERS"
OTHERS_TIMEOUT_S = 10.0
"""Seconds that all other trackers together may take at the end of a refresh."""


class Shipper:
    """Copier of one refresh's ledger (event log) and metrics to MLflow."""

    def __init__(self, ledger: Ledger, client: MlflowClient):
        self.ledger = ledger
        self.client = client
        self.shipped = read_shipped(ledger)
        # An earlier process may have died between creating a run and recording its id; `_create_run` looks for it.
        self._recovering = bool(self.shipped.experiment_id)

    def ship(self) -> bool:
        """Copy new events of the refresh to MLflow; return whether the refresh is over and MLflow has all of it.

        Raises what the MLflow client raises when the server is away; call it again later.
        """
        if self.shipped.has_all_of(self.ledger):
            return True
        # The size is read first: an event that is appended in between makes `has_all_of` false, and is shipped later.
        size, record = self.ledger.size(), self.ledger.read()
        parent = self._parent_run(record)
        done = [self._ship_attempt(attempt, parent) for attempt in record.attempts.values()]
        if record.state == "running" or not all(done):
            return False
        for number in range(len(record.comparison.layouts) if record.comparison else 0):
            self._ship_layout(record, number, parent)
        # After all its children, since the parent's page names their runs.
        self._finish_parent(record, parent)
        # From here on nothing is sent again, unless a retry makes the ledger longer.
        self._save(done=True, ledger_bytes=size, trouble=None)
        return True

    def note_trouble(self, error: Exception) -> None:
        """Record a failure to copy in `mlflow.json`; an MLflow run may have been created nevertheless."""
        self._recovering = True
        self._save(trouble=shortened(f"{type(error).__name__}: {error}", LONGEST_TROUBLE))

    def _save(self, **changes: object) -> None:
        self.shipped = self.shipped.model_copy(update=changes)
        write_shipped(self.ledger, self.shipped)

    def _parent_run(self, record: RefreshRecord) -> str:
        if self.shipped.experiment_id is None:
            self._save(experiment_id=experiment_id(self.client))
        if self.shipped.parent_run_id is None:
            run = self._create_run("refresh", record.refresh, record.refresh, record.started_ms, parent_tags(record))
            # Before the id is recorded: after a crash the run is found again, and MLflow takes equal parameters twice.
            log_params(self.client, run, parent_params(record))
            self._save(parent_run_id=run, trouble=None)
        assert self.shipped.parent_run_id
        if self.shipped.done:  # MLflow has an earlier try of this refresh
            self.client.update_run(self.shipped.parent_run_id, status="RUNNING")
            self._save(done=False)
        return self.shipped.parent_run_id

    def _ship_attempt(self, attempt: AttemptRecord, parent: str) -> bool:
        """Copy an attempt's new metrics to MLflow; return whether it is over and MLflow has all of them."""
        known = self.shipped.attempts.get(attempt.name) or self._begin_attempt(attempt, parent)
        if known.done:
            return True
        known = self._ship_metrics(attempt, known)
        if attempt.ended is None:
            return False
        self._finish_attempt(attempt, known.run_id)
        self._save_attempt(attempt, known.model_copy(update={"done": True}))
        return True

    def _begin_attempt(self, attempt: AttemptRecord, parent: str) -> ShippedAttempt:
        began = attempt.began
        tags = {**attempt.tags, "mlflow.parentRunId": parent}
        tags |= UNFOLDED if makes(attempt.tags["kind"], "scores") else {}
        identity = f"{self.ledger.folder.name}/{attempt.name}"
        run = self._create_run("attempt", identity, began.stage, began.time_ms, tags)
        log_params(self.client, run, began.params)
        # Known from the beginning, so that a run that fails early shows its data too.
        log_datasets(self.client, run, datasets_read(attempt.tags, began.params, store_root()))
        # A resumed attempt appends to the metrics file of the one before it; its own part begins at `first_byte`.
        return self._save_attempt(attempt, ShippedAttempt(run_id=run, next_byte=began.first_byte))

    def _ship_layout(self, record: RefreshRecord, number: int, parent: str) -> None:
        """Create a compared layout's MLflow run once the comparison is over; its last values are the table's."""
        name = f"{LAYOUTS}/{number}"
        if record.comparison is None or name in self.shipped.attempts:
            return
        layout, measured = record.comparison.layouts[number], record.measured.get(number)
        error = measured.error if measured else "the comparison ended before this layout was measured"
        tags = layout_tags(record, number) | {"mlflow.parentRunId": parent} | ({"error": error} if error else {})
        run = self._create_run("comparison", f"{record.refresh}/{number}", layout.text, record.started_ms, tags)
        log_params(self.client, run, {**layout.params, "num_devices": str(layout.num_devices), **how_measured(record)})
        rows = trial_rows(record, number)
        last_step = max((row.step for row in rows), default=0)
        ended_ms = record.started_ms + round(1000 * record.seconds)
        final = measured.metrics if measured else {}
        # At the last trial's last step, but later than it: of two values MLflow's list of runs shows the later.
        rows += [MetricRow(acceptable(name), value, ended_ms, last_step) for name, value in final.items()]
        log_metrics(self.client, run, rows)
        self.client.set_terminated(run, "FAILED" if error else "FINISHED", ended_ms)
        # Recorded after everything is sent: a crash before this sends the layout again, into the same run.
        shipped = ShippedAttempt(run_id=run, next_byte=0, done=True)
        self._save(attempts={**self.shipped.attempts, name: shipped}, trouble=None)

    def _save_attempt(self, attempt: AttemptRecord, shipped: ShippedAttempt) -> ShippedAttempt:
        self._save(attempts={**self.shipped.attempts, attempt.name: shipped}, trouble=None)
        return shipped

    def _create_run(self, tag: str, identity: str, name: str, started_ms: int, tags: dict[str, str]) -> str:
        """Create an MLflow run, or return the one that an earlier try created without recording its id."""
        experiment = self.shipped.experiment_id
        if self._recovering:
            # The tag is set in the request that creates the run, so no run of ours is without it.
            found = self.client.search_runs([experiment], f"tags.`lifecycle.{tag}` = '{identity}'", max_results=1)
            if found:
                return str(found[0].info.run_id)
        tags = {name: shortened(value, LONGEST_VALUE) for name, value in tags.items()} | {f"lifecycle.{tag}": identity}
        return str(self.client.create_run(experiment, start_time=started_ms, tags=tags, run_name=name).info.run_id)

    def _ship_metrics(self, attempt: AttemptRecord, known: ShippedAttempt) -> ShippedAttempt:
        folder = folder_of(attempt)
        # A step that an earlier attempt has logged, too, is not shipped again.
        earlier = last_steps(folder, attempt.began.first_byte)
        series = MetricSeries(folder, known.next_byte, attempt.last_byte, earlier)
        for batch in batches(series):
            log_metrics(self.client, known.run_id, batch.rows)
            # Saved after each batch: a kill repeats one batch at most, and MLflow drops equal values.
            known = self._save_attempt(attempt, known.model_copy(update={"next_byte": batch.next_byte}))
        return known

    def _finish_attempt(self, attempt: AttemptRecord, run: str) -> None:
        ended = attempt.ended
        assert ended and attempt.outcome
        folder = folder_of(attempt)
        log_metrics(self.client, run, final_rows(attempt.metrics, folder, ended.last_byte, ended.time_ms))
        tags = attempt.tags | ({"error": ended.error} if ended.error else {})
        scores = scores_text(attempt.tags["kind"], attempt.metrics)
        tags |= {"scores": scores} if scores else {}
        set_tags(self.client, run, tags)
        log_datasets(self.client, run, tasks_read(folder))
        # Uploads again after a crash overwrite files of the same name.
        log_files(self.client, run, folder, ended.files)
        # Last of all: what MLflow calls finished is complete.
        self.client.set_terminated(run, ATTEMPT_STATUS[attempt.outcome], ended.time_ms)

    def _finish_parent(self, record: RefreshRecord, parent: str) -> None:
        assert self.shipped.experiment_id
        ended_ms = record.started_ms + round(1000 * record.seconds)
        if not record.comparison:
            rows = [*stage_rows(record, ended_ms), MetricRow("seconds", record.seconds, ended_ms, 0)]
            log_metrics(self.client, parent, rows)
        runs = {name: run_id_of(entry.attempt) for name, entry in record.stages.items()}
        notes = note(record, runs, self.shipped.experiment_id)
        folder = self.ledger.folder
        for file in filter(Path.exists, (folder / REPORT_FILE, folder / ROWS_FILE)):
            self.client.log_artifact(parent, str(file))
        if (folder / NOTE_FILE).exists():
            notes = f"{(folder / NOTE_FILE).read_text(encoding='utf-8')}\n\n{notes}"
        description = {"mlflow.note.content": notes}
        set_tags(self.client, parent, parent_tags(record) | stage_tags(record, runs) | score_tags(record) | description)
        self.client.set_terminated(parent, RUN_STATUS[record.state], ended_ms)


def main() -> None:
    """Copy a ledger (folder: first argument) to MLflow until stdin ends, then what MLflow lacks of other refreshes."""
    collect_rarely()
    if not uses_mlflow():
        sys.stdin.read()  # until the refresh has ended
        send_missing_spans()
        return
    # Before mlflow is imported, which starts its telemetry then.
    os.environ.update(CLIENT_ENVIRONMENT)
    # Hide these packages: importing them takes two fifths of the start. MLflow's skinny distribution lacks all but the
    # last; `requests` uses charset_normalizer instead of chardet, and imports that anyway.
    missing: dict[str, Any] = dict.fromkeys(("numpy", "pandas", "pyarrow", "scipy", "chardet"))
    sys.modules.update(missing)
    from mlflow import MlflowClient

    client = MlflowClient()
    ledger = Ledger(Path(sys.argv[1]))
    with shipper_lock(ledger):
        shipper = Shipper(ledger, client)
        pause_s = INTERVAL_S
        # The refresh holds the other end of stdin and writes nothing there: it can be read when the refresh has ended.
        while not select.select([sys.stdin], [], [], pause_s)[0]:
            pause_s = INTERVAL_S if _try_to_ship(shipper) else RETRY_INTERVAL_S
        # A refresh writes its last event before it closes its end of stdin, so this ships all of them.
        complete = _try_to_ship(shipper)
    send_missing_spans()
    # Only if MLflow has just answered.
    if complete:
        ship_pending(client)


def ship_pending(client: MlflowClient) -> None:
    """Copy to MLflow what it still lacks of finished refreshes, unless another process is copying them."""
    for ledger in ledgers():
        if read_shipped(ledger).has_all_of(ledger):
            continue
        try:
            record = ledger.read()
        except StoreError as error:  # of a damaged ledger; the others are shipped
            print(f"{time.strftime('%H:%M:%S')} not shipped: {error}", flush=True)
            continue
        # In a copied home, MLflow's runs are the original's, unless the MLflow is a copy, too.
        is_ours = not record.is_copied or os.environ.get("MLFLOW_TRACKING_URI") == address_of(MLFLOW.name)
        if record.state != "running" and is_ours:
            # Held elsewhere: that process ships it.
            with contextlib.suppress(Timeout), shipper_lock(ledger).acquire(blocking=False):
                _try_to_ship(Shipper(ledger, client))


def shipper_lock(ledger: Ledger) -> FileLock:
    """Return the lock that a `Shipper` must hold, since two copying at once would create every MLflow run twice."""
    # On file systems without locks, no soft lock either, a mere file: that of a killed process would stay.
    return FileLock(ledger.folder / "shipping.lock", fallback_to_soft=False)


def _try_to_ship(shipper: Shipper) -> bool:
    """Copy new events of a refresh to MLflow; return whether MLflow accepted them."""
    try:
        shipper.ship()
    except Exception as error:
        # Whatever the client raises, training goes on; what was not shipped stays recorded.
        print(f"{time.strftime('%H:%M:%S')} not shipped: {redact(f'{type(error).__name__}: {error}')}", flush=True)
        shipper.note_trouble(error)
        return False
    return True


def experiment_id(client: MlflowClient) -> str:
    """Return the id of the MLflow experiment `llm-lifecycle`, created when absent, even if another process does so now.

    Tags that it has already are kept: a person may have changed them.
    """
    from mlflow.exceptions import MlflowException

    # Another process may create the experiment between the two requests; then it is there to be read below.
    with contextlib.suppress(MlflowException):
        known = client.get_experiment_by_name(EXPERIMENT)
        identity = str(known.experiment_id if known else client.create_experiment(EXPERIMENT))
        for name in EXPERIMENT_TAGS.keys() - (known.tags.keys() if known else ()):
            client.set_experiment_tag(identity, name, EXPERIMENT_TAGS[name])
        return identity
    return str(client.get_experiment_by_name(EXPERIMENT).experiment_id)


def folder_of(attempt: AttemptRecord) -> Path:
    """Return the folder of an attempt's files: its work folder, or the artifact that this became, perhaps later."""
    artifact = store_root() / attempt.tags["kind"] / f"{attempt.began.stage}-{attempt.tags['version']}"
    return attempt.folder if attempt.folder.exists() else artifact


class Tracker:
    """Handle of the separate processes that copy one refresh to MLflow, and to other trackers that are asked for.

    LIFECYCLE_TRACKERS names those, with commas between; all is done on a best-effort basis. Importing mlflow costs two
    CPU-seconds, and a call to a slow server may take any time; neither delays a stage.
    Events are in the ledger first, so nothing is lost when MLflow, or that process, is away.
    """

    def __init__(self, ledger: Ledger):
        self._folder = ledger.folder
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._others: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, environment: dict[str, str]) -> None:
        """Start the copying process, which ends after `close` or this process's death. environment: where MLflow is."""
        self._environment = environment
        self._process = self._started("flows.tracking.shipper")
        for name in other_trackers():
            if name not in self._others:
                self._others[name] = self._started("flows.tracking.copies", name)

    def _started(self, *program: str) -> subprocess.Popen[bytes]:
        with (self._folder / "tracking.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *program, str(self._folder)],
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must stop the refresh only, whose end is then shipped
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait up to `timeout_s` for the copying process (restarted if killed); the next refresh copies the rest."""
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
        self._close_others()

    def _close_others(self) -> None:
        """Let the other trackers finish within some seconds altogether, and name those that lack a part, once."""
        others, self._others = self._others, {}
        for process in others.values():
            assert process.stdin
            process.stdin.close()
        end_s = time.monotonic() + OTHERS_TIMEOUT_S
        for name, process in others.items():
            trouble = None
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                trouble = f"it did not finish in {OTHERS_TIMEOUT_S:g} s"
            # Helpers of a tracker belong to its session, and end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if trouble or process.returncode:
                trouble = trouble or _trouble_of(self._folder, name)
                say(f"warning: {name} lacks a part of this refresh, and gets it with the next: {trouble}", sys.stderr)


def other_trackers() -> list[str]:
    """Return the names of the trackers beside MLflow that LIFECYCLE_TRACKERS asks for, each once."""
    names = (name.strip() for name in os.environ.get(OTHERS_VARIABLE, "").split(","))
    return [name for name in dict.fromkeys(names) if name]


def _trouble_of(ledger_folder: Path, tracker: str) -> str:
    """Return why a tracker's process failed, from the file that it left (`copies.py`)."""
    with contextlib.suppress(OSError, ValueError):
        if trouble := read_json_object(ledger_folder / f"copied-{tracker}.json").get("trouble"):
            return str(trouble)
    return f"its process ended at once; {ledger_folder / 'tracking.log'} may tell why"


if __name__ == "__main__":
    main()
