"""Program of a cluster job on a machine without the home's disk: it brings the stage's files there and back.

    python -m flows.launch.away_task s3://BUCKET/PREFIX JOB

LIFECYCLE_HOME is an empty folder of the same path as the home. The program receives the work folder and the input
artifacts, runs `node_task`, and meanwhile sends what the stage writes; it exits with the stage's exit code. Its
credentials are in its environment.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.launch.cluster_job import ENDED, HEARTBEAT, JobEnd, JobFolder
from flows.launch.failures import INTERRUPTED, leave_error
from flows.launch.through_bucket import (
    GROWING,
    NOT_MADE,
    PARCEL,
    PRODUCT,
    SCRATCH,
    TEMPORARY,
    Contents,
    Parcel,
    files_below,
    insist,
    read,
    scratch_of,
    size_of,
)
from flows.ledger.home import home, store_root
from flows.store.content import SCRATCH_FOLDER, FileEntry, hash_file
from flows.store.objects import go_on
from flows.store.remote import SETTING_FILE, SHARED_JOBS, Remote
from flows.store.shared import receive
from flows.store.store import Store
from stages.core.contract import SYNCED_WEIGHTS, StageInput
from stages.core.errors import LifecycleError, StoreError, TransientError, class_name
from stages.core.files import remove_cut_off_line, write_atomically
from stages.core.redaction import redact_files, secrets_in
from stages.core.supervised import SupervisedProcess

POLL_INTERVAL_S = 0.2
SYNC_INTERVAL_S = 2.0
SCRATCH_INTERVAL_S = 30.0
"""Seconds between two sendings of scratch files without a new checkpoint: files that grow are sent whole each time."""
REST_PER_SENDING = 5
"""Seconds without such a sending for each second that the last one took."""
LEAST_GROWTH = 0.02
"""Growth of a log at which it is sent again while the stage runs, so that what goes out is no square of its size."""
GRACE_S = 15.0
"""Seconds that the stage has to end after SIGTERM; a pod has 30, in which its last checkpoint is sent, too."""
CHECKPOINT = re.compile(r"checkpoints/step-[^/]+/")
"""Pattern of files that do not change any more: a checkpoint is complete once it is renamed."""
OF_NO_USE = re.compile(rf"{SYNCED_WEIGHTS}/|checkpoints/partial-|{TEMPORARY.pattern}$")
"""Pattern of scratch files that no other attempt reads."""
MOST_COPIED_BYTES = 1 << 30
"""Size up to which a scratch file is copied before it is sent, since the stage may write to it."""


Stamp = tuple[int, int, int]
"""Inode, size and time of writing of a file."""


class Courier:
    """The node's end of a job: receives what the stage needs, sends what it writes, and hears the heartbeats."""

    def __init__(self, remote: Remote, parcel: Parcel) -> None:
        self._remote, self._parcel, self._work = remote, parcel, parcel.order.work
        self._folder, self._store = JobFolder.of(self._work), Store(store_root())
        self._job = f"{SHARED_JOBS}/{parcel.order.job}"
        self._there = f"{self._job}/{parcel.number}"
        self._sizes: dict[str, int] = {}
        self._scratch: dict[str, tuple[Stamp, FileEntry]] = {}
        self._scratch_due_s = 0.0

    def receive(self, check: Callable[[], None]) -> None:
        """Receive the work folder and the input artifacts, and name these in the stage's `config.json`."""
        self._remote.receive(self._parcel.files, self._work, check)
        self._sizes = {name: size_of(self._work / name) for name in GROWING}
        sent = scratch_of(self._parcel.files)
        self._scratch = {name: (stamp, sent[name]) for name, stamp in self._look().items() if name in sent}
        file = self._work / "config.json"
        stage_input = StageInput.model_validate_json(file.read_bytes())
        # By the records of the agent's home: another home may have replaced an artifact meanwhile.
        inputs = {
            stage: receive(self._store, self._remote, record, check).folder
            for stage, record in self._parcel.inputs.items()
        }
        cache = self._store.make_folder(self._store.cache_folder(stage_input.kind))
        here = stage_input.model_copy(update={"inputs": inputs, "cache": cache})
        write_atomically(file, here.model_dump_json(indent=2))

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Write down the agent's heartbeats, on which `node_task` waits."""
        is_over = threading.Event()

        def hear() -> None:
            while not is_over.wait(SYNC_INTERVAL_S):
                # Without an answer there is no heartbeat: after some minutes of that the job ends.
                with suppress(LifecycleError):
                    if held := self._remote.objects.read(f"{self._job}/{HEARTBEAT}"):
                        (self._folder.path / HEARTBEAT).write_bytes(held.content)

        listener = threading.Thread(target=hear, daemon=True)
        listener.start()
        try:
            yield
        finally:
            is_over.set()
            listener.join()

    def send_progress(self, check: Callable[[], None]) -> None:
        """Send, while the stage runs, what is worth it by now: grown logs, a new checkpoint, other files at times."""
        self.send_growing(check, LEAST_GROWTH)
        if _checkpoints(self._look()) - _checkpoints(self._scratch) or time.monotonic() > self._scratch_due_s:
            self.send_scratch(check)

    def send_scratch(self, check: Callable[[], None] = go_on) -> None:
        """Send the scratch files that have changed, as they are now, and the metrics that precede them."""
        if not self._sizes:
            return  # a part of what is yet to be received must not replace the whole
        began_s, seen = time.monotonic(), self._look()
        if seen == {name: stamp for name, (stamp, _) in self._scratch.items()}:
            return
        sent = {name: self._scratch[name] for name in seen.keys() & self._scratch.keys()}
        with self._store.explained("copy scratch files"), self._copies() as copies:
            for name in seen:
                if name not in sent or sent[name][0] != seen[name]:
                    with suppress(FileNotFoundError):  # the stage has removed it
                        _copy(self._work / SCRATCH_FOLDER, name, copies)
            if _checkpoints(self._look()) != _checkpoints(seen):
                return  # one came and another went: none that was copied may be whole
            fresh = {name: hash_file(copies / name) for name in files_below(copies)}
            # What is too large to be copied is sent when the stage does not write to it.
            for name in [*fresh]:
                if (stamp := _stamp(copies / name)) != seen[name] and stamp[0] == seen[name][0]:
                    del fresh[name]
            self._remote.send_files(fresh, copies, check)
        # The steps before a checkpoint are not logged again by those who go on from it.
        self.send_growing(check)
        sent |= {name: (seen[name], entry) for name, entry in fresh.items()}
        self._write(SCRATCH, Contents(files={name: entry for name, (_, entry) in sent.items()}))
        self._scratch = sent
        now_s = time.monotonic()
        self._scratch_due_s = now_s + max(SCRATCH_INTERVAL_S, REST_PER_SENDING * (now_s - began_s))

    def send_product(self, exit_code: int) -> None:
        """Send what the stage, now over, has made or failed with, beside what is sent while it runs; the end last."""
        self.send_growing(is_over=True)
        redact_files(self._work, secrets_in(os.environ))
        names = [name for name in files_below(self._work) if name.split("/")[0] not in NOT_MADE]
        files = {name: hash_file(self._work / name) for name in names}
        self._remote.send_files(files, self._work, go_on)
        self._write(PRODUCT, Contents(files=files))
        self._write(ENDED, JobEnd(job_id=self._parcel.order.job, exit_code=exit_code))

    def send_growing(
        self, check: Callable[[], None] = go_on, least_growth: float = 0.0, *, is_over: bool = False
    ) -> None:
        """Send log, metrics and events as far as they are written, without secrets; until the end, whole lines only.

        least_growth: since the last time.
        """
        for name, sent in [*self._sizes.items()]:
            if size_of(self._work / name) <= sent * (1 + least_growth):
                continue
            with self._store.explained(f"copy {name}"), self._copies() as copies:
                shutil.copyfile(self._work / name, copies / name)
                if not is_over:
                    remove_cut_off_line(copies / name)
                if (size := size_of(copies / name)) > sent:
                    redact_files(copies, secrets_in(os.environ))
                    self._remote.objects.send(f"{self._there}/{name}", copies / name, check)
                    self._sizes[name] = size

    @contextmanager
    def _copies(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder.path) as folder:
            yield Path(folder)

    def _write(self, name: str, content: Contents | JobEnd) -> None:
        self._remote.objects.write(f"{self._there}/{name}", content.model_dump_json().encode())

    def _look(self) -> dict[str, Stamp]:
        """Return the stamps of the scratch files that another attempt may need."""
        scratch, stamps = self._work / SCRATCH_FOLDER, {}
        for name in files_below(scratch):
            if not OF_NO_USE.match(name):
                with suppress(FileNotFoundError):
                    stamps[name] = _stamp(scratch / name)
        return stamps


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checkpoints(names: Iterable[str]) -> set[str]:
    return {name for name in names if CHECKPOINT.match(name)}


def _copy(scratch: Path, name: str, copies: Path) -> None:
    """Copy a scratch file; link what changes no more, or is too large to be copied."""
    (copies / name).parent.mkdir(parents=True, exist_ok=True)
    if CHECKPOINT.match(name) or (scratch / name).stat().st_size > MOST_COPIED_BYTES:
        os.link(scratch / name, copies / name)
    else:
        shutil.copyfile(scratch / name, copies / name)


def main() -> int:
    """Bring the stage's files here, run the stage, and send back what it makes; return its exit code."""
    os.umask(0o077)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    address, job = sys.argv[1:]
    try:
        with Store(store_root()).explained(f"run {job}"):
            return _run(Remote(address), job, stop)
    except LifecycleError as error:
        print(f"{class_name(error)}: {error}", flush=True)
        return INTERRUPTED if stop.is_set() else error.exit_code


def _run(remote: Remote, job: str, stop: threading.Event) -> int:
    parcel = read(remote, f"{SHARED_JOBS}/{job}/{PARCEL}", Parcel)
    if parcel is None:
        raise StoreError(f"starting {job}: {remote.address} has no {SHARED_JOBS}/{job}/{PARCEL}; its refresh is over")
    home().mkdir(parents=True, exist_ok=True)
    (home() / SETTING_FILE).write_text(f"store: {remote.address}\n")
    work = parcel.order.work
    work.mkdir(parents=True, exist_ok=True)
    JobFolder.of(work).write(parcel.order, parcel.environment)
    courier = Courier(remote, parcel)
    with courier.hearing():
        code = _run_stage(courier, work, stop)
    is_interrupted = code == INTERRUPTED and not JobFolder.of(work).end(job)
    # What a stage has made in hours waits for a storage that is away, also when the job is asked to end.
    if code:
        with suppress(LifecycleError):
            insist(courier.send_growing)
            insist(courier.send_scratch)
    if not is_interrupted:
        insist(lambda: courier.send_product(code))
    return code


def _run_stage(courier: Courier, work: Path, stop: threading.Event) -> int:
    """Receive the stage's files and run it; return its exit code, or that of an interrupted job."""

    def check() -> None:
        if stop.is_set():
            raise TransientError("the job was asked to end")

    try:
        courier.receive(check)
    except LifecycleError as error:
        return INTERRUPTED if stop.is_set() else leave_error(work, error)
    command = [sys.executable, "-m", "flows.launch.node_task", str(JobFolder.of(work).path)]
    process = SupervisedProcess(command, environment=dict(os.environ), output=sys.stdout.buffer, grace_s=GRACE_S)
    synced_s = time.monotonic()
    while (code := process.poll()) is None:
        if time.monotonic() - synced_s > SYNC_INTERVAL_S:
            # The storage may be away for a while: the end is sent with all that came before it.
            with suppress(LifecycleError):
                courier.send_progress(check)
            synced_s = time.monotonic()
        if stop.wait(POLL_INTERVAL_S):
            process.stop()
            return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
