"""Program of a cluster job on a machine without the home's disk: it brings the stage's files there and back.

    python -m flows.launch.away_task s3://BUCKET/PREFIX JOB

LIFECYCLE_HOME is an empty folder of the same path as the home. The program receives the work folder and the input
artifacts, runs `node_task`, and meanwhile sends what the stage writes; it exits with the stage's exit code. Its
credentials are in its environment.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from flows.launch.cluster_job import JobEnd, JobFolder, JobOrder
from flows.launch.failures import INTERRUPTED, leave_error
from flows.launch.through_bucket import (
    ENDED,
    GROWING,
    HEARTBEAT,
    NOT_MADE,
    PARCEL,
    PRODUCT,
    SCRATCH,
    Parcel,
    files_below,
    send_files,
    size_of,
)
from flows.ledger.home import home, store_root
from flows.store.content import SCRATCH_FOLDER
from flows.store.objects import go_on
from flows.store.remote import SETTING_FILE, SHARED_JOBS, Remote
from flows.store.shared import obtain
from flows.store.store import Store
from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, StoreError
from stages.core.files import write_atomically
from stages.core.supervised import SupervisedProcess

POLL_INTERVAL_S = 0.2
SYNC_INTERVAL_S = 2.0
LEAST_GROWTH = 0.02
"""Growth of a log at which it is sent again while the stage runs, so that what goes out is no square of its size."""
GRACE_S = 15.0
"""Seconds that the stage has to end after SIGTERM; a pod has 30, in which its last checkpoint is sent, too."""


class Courier:
    """The node's end of a job: sends what the stage writes, and hears the agent's heartbeats."""

    def __init__(self, remote: Remote, job: str, work: Path, number: int) -> None:
        self._remote, self._work, self._number = remote, work, number
        self._job = f"{SHARED_JOBS}/{job}"
        self._there = f"{self._job}/{number}"
        self._sent: dict[str, int] = {}
        self._scratch: dict[str, tuple[int, int, int]] = self._look()

    def hear(self, is_over: threading.Event) -> None:
        """Write down the agent's heartbeats, on which `node_task` waits, until the job is over."""
        heartbeat = JobFolder.of(self._work).path / HEARTBEAT
        while not is_over.wait(SYNC_INTERVAL_S):
            # Without an answer there is no heartbeat: after a minute of that the job ends.
            with suppress(LifecycleError):
                if held := self._remote.objects.read(f"{self._job}/{HEARTBEAT}"):
                    heartbeat.write_bytes(held.content)

    def send_growing(self, least_growth: float = 0.0) -> None:
        """Send log, metrics and events as far as they are written, each whole. least_growth: since the last time."""
        for name in GROWING:
            size, sent = size_of(self._work / name), self._sent.get(name, 0)
            if size > sent * (1 + least_growth):
                self._remote.objects.send(f"{self._there}/{name}", self._work / name, go_on)
                self._sent[name] = size

    def send_scratch(self) -> None:
        """Send the scratch files, unless they are those sent last; what changes while it is sent is sent next time."""
        before = self._look()
        if before == self._scratch:
            return
        try:
            parcel = send_files(self._remote, self._work / SCRATCH_FOLDER, before, self._number)
        except (OSError, StoreError):  # a file went, or changed between its hash and its sending
            return
        if self._look() == before:
            self._write(SCRATCH, parcel)
            self._scratch = before

    def send_product(self) -> None:
        """Send what the stage has made or failed with, beside what is sent while it runs."""
        names = [name for name in files_below(self._work) if name.split("/")[0] not in NOT_MADE]
        self._write(PRODUCT, send_files(self._remote, self._work, names, self._number))

    def send_end(self, end: JobEnd) -> None:
        self._remote.objects.write(f"{self._there}/{ENDED}", end.model_dump_json().encode())

    def _write(self, name: str, parcel: Parcel) -> None:
        self._remote.objects.write(f"{self._there}/{name}", parcel.model_dump_json().encode())

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Return inode, size and time of writing of all scratch files: a checkpoint is complete once it is renamed."""
        scratch, stamps = self._work / SCRATCH_FOLDER, {}
        for name in files_below(scratch):
            with suppress(FileNotFoundError):
                status = (scratch / name).stat()
                stamps[name] = status.st_ino, status.st_size, status.st_mtime_ns
        return stamps


def main() -> int:
    """Bring the stage's files here, run the stage, and send back what it makes; return its exit code."""
    os.umask(0o077)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    address, job = sys.argv[1:]
    remote = Remote(address)
    held = remote.objects.read(f"{SHARED_JOBS}/{job}/{PARCEL}")
    assert held, f"no {SHARED_JOBS}/{job}/{PARCEL} in {address}"
    parcel = Parcel.model_validate_json(held.content)
    home().mkdir(parents=True, exist_ok=True)
    (home() / SETTING_FILE).write_text(f"store: {address}\n")
    work = parcel.folder
    remote.receive(parcel.files, work)
    order = JobFolder.of(work).order()
    assert order, f"no order in {work}"
    courier, is_over = Courier(remote, job, work, parcel.number), threading.Event()
    listener = threading.Thread(target=courier.hear, args=[is_over], daemon=True)
    listener.start()
    try:
        code = _run(order, courier, stop)
    finally:
        is_over.set()
        listener.join()
    courier.send_growing()
    if code == INTERRUPTED:
        courier.send_scratch()
        return code
    courier.send_product()
    courier.send_end(JobEnd(job_id=job, exit_code=code))
    return code


def _run(order: JobOrder, courier: Courier, stop: threading.Event) -> int:
    """Receive the stage's inputs and run it; return its exit code, or that of an interrupted job."""
    try:
        _receive_inputs(order.work)
    except LifecycleError as error:
        return leave_error(order.work, error)
    command = [sys.executable, "-m", "flows.launch.node_task", str(JobFolder.of(order.work).path)]
    process = SupervisedProcess(command, environment=dict(os.environ), output=sys.stdout.buffer, grace_s=GRACE_S)
    synced_s = time.monotonic()
    while (code := process.poll()) is None:
        if time.monotonic() - synced_s > SYNC_INTERVAL_S:
            # The storage may be away for a while: the end is sent with all that came before it.
            with suppress(LifecycleError):
                courier.send_growing(LEAST_GROWTH)
                courier.send_scratch()
            synced_s = time.monotonic()
        if stop.wait(POLL_INTERVAL_S):
            process.stop()
            return INTERRUPTED
    return code


def _receive_inputs(work: Path) -> None:
    """Receive the input artifacts, and name their folders here in the stage's `config.json`."""
    store, file = Store(store_root()), work / "config.json"
    given = StageInput.model_validate_json(file.read_bytes())
    inputs = {}
    for stage, folder in given.inputs.items():
        kind, version = folder.parent.name, folder.name.rpartition("-")[2]
        artifact = obtain(store, kind, version)
        if artifact is None:
            raise StoreError(f"receiving the input {stage} for a job: the shared store has no {kind}/{version}")
        inputs[stage] = artifact.folder
    cache = store.make_folder(store.cache_folder(given.kind))
    write_atomically(file, given.model_copy(update={"inputs": inputs, "cache": cache}).model_dump_json(indent=2))


if __name__ == "__main__":
    sys.exit(main())
