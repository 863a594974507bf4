"""Cluster job on a machine without this home's disk: its files pass through the shared store's bucket.

    jobs/<job>/parcel.json        what the job starts with (`Parcel`); the files of its work folder are blobs
    jobs/<job>/heartbeat          changes every few seconds while the agent waits for the job
    jobs/<job>/<number>/<name>    of one start: log, metrics and events as they grow, `scratch.json` (the latest scratch
                                  files), `product.json` (what the stage has made), and `ended.json`, the last

The agent is one end (`JobMirror`), a program on the node the other (`flows/launch/away_task.py`). The node has the
home's paths on an empty disk of its own, and receives the input artifacts from the shared store as another home would.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from flows.launch.cluster_job import ENDED, HEARTBEAT, JobEnd, JobFolder, JobOrder
from flows.ledger.home import store_root
from flows.store.content import (
    ATTEMPT_FILE,
    LAUNCH_FOLDER,
    LOG_FILE,
    NOT_OF_THE_ARTIFACT,
    SCRATCH_FOLDER,
    SERIES,
    FileEntry,
    Files,
    hash_file,
)
from flows.store.objects import go_on
from flows.store.record import Record
from flows.store.remote import SHARED_JOBS, Remote
from flows.store.store import Store, read_artifact
from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, StoreError, TransientError
from stages.core.fields import StrictModel, what_is_wrong
from stages.core.files import remove_cut_off_line

GROWING = (LOG_FILE, *sorted(SERIES))
"""Files that are copied while they grow; each end appends to them what the other has added."""
NOT_MADE = frozenset({*NOT_OF_THE_ARTIFACT, *GROWING, "config.json"})
"""Names in a work folder that are no part of what its stage makes, or are sent while it runs."""
NOT_SENT = frozenset({ATTEMPT_FILE, LAUNCH_FOLDER})
TEMPORARY = re.compile(r"(.*/)?\.[^/]*\.\d+")
"""Pattern of files that `write_atomically` is about to rename."""
PARCEL, SCRATCH, PRODUCT = "parcel.json", "scratch.json", "product.json"
BEAT_INTERVAL_S = 5.0
PATIENCE_S = 600.0
"""Seconds for which the end of a stage is sent and received again while the storage does not answer."""
RETRY_INTERVAL_S = 5.0


class Contents(StrictModel):
    """Files of a folder, whose contents are blobs of the shared store."""

    files: Files


class Parcel(Contents):
    """All that a job starts with. files: of its work folder.

    number: of the job's starts, this one too. environment: of the stage's processes; it is no blob, since blobs outlive
    the job. inputs: records of the stage's input artifacts as this home has them, by stage.
    """

    number: int
    order: JobOrder
    environment: dict[str, str]
    inputs: dict[str, Record]


Model = TypeVar("Model", bound=StrictModel)


def read(remote: Remote, name: str, model: type[Model]) -> Model | None:
    """Return an object of a job; None when there is none. Raises StoreError for one that no job can have written."""
    held = remote.objects.read(name)
    try:
        return model.model_validate_json(held.content) if held else None
    except ValidationError as error:
        raise StoreError(
            f"{remote.address}/{name} cannot be read: {what_is_wrong(error)}; the image of the job must hold the same "
            "version of this program as this home"
        ) from None


def insist(act: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
    """Do what needs the storage, again and again while it does not answer. Raises TransientError in the end."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except TransientError as error:
            if time.monotonic() > end_s:
                raise
            print(f"{error}; trying again", flush=True)
        time.sleep(RETRY_INTERVAL_S)


class JobMirror:
    """The agent's end of a job that runs away from this home."""

    def __init__(self, order: JobOrder) -> None:
        assert order.through
        self._order, self._work, self._folder = order, order.work, JobFolder.of(order.work)
        self._remote = Remote(order.through)
        self._store = Store(store_root())
        self._there = f"{SHARED_JOBS}/{order.job}"
        self._number = 0
        self._taken = dict.fromkeys(GROWING, 0)
        self._scratch: Files = {}
        self._has_all = True

    def send(self, check: Callable[[], None] = go_on) -> None:
        """Send the work folder, before the job of this order is submitted once more. check: as in `Remote.send`."""
        self._number += 1
        self._has_all = False
        stage_input = StageInput.model_validate_json((self._work / "config.json").read_bytes())
        with self._store.explained(f"send {self._work} to {self._remote.address}"):
            for name in SERIES:
                # The stage does so before it appends: both ends must count the same bytes.
                remove_cut_off_line(self._work / name)
            self._taken = {name: size_of(self._work / name) for name in GROWING}
            names = [name for name in files_below(self._work) if name.split("/")[0] not in NOT_SENT]
            files = {name: hash_file(self._work / name) for name in names if not TEMPORARY.fullmatch(name)}
        self._scratch = scratch_of(files)
        self._remote.send_files(files, self._work, check)
        parcel = Parcel(
            files=files,
            number=self._number,
            order=self._order,
            environment=self._folder.environment(),
            inputs={stage: _record_in(folder) for stage, folder in stage_input.inputs.items()},
        )
        self._remote.objects.write(f"{self._there}/{PARCEL}", parcel.model_dump_json().encode())

    def beat(self, is_over: threading.Event) -> None:
        """Write heartbeats until the job is over, in a thread of their own: receiving a checkpoint takes minutes."""
        while True:
            # The job has more patience than a storage that is away for a while needs.
            with suppress(LifecycleError):
                self._remote.objects.write(f"{self._there}/{HEARTBEAT}", str(time.time_ns()).encode())
            if is_over.wait(BEAT_INTERVAL_S):
                return

    def fetch(self, check: Callable[[], None] = go_on) -> None:
        """Receive what the job has written since the last call; after its end also its product, and the end last.

        check: as in `Remote.receive`.
        """
        if self._has_all:
            return
        there = f"{self._there}/{self._number}"
        # First: what comes after it is then whole. No checkpoint may be ahead of the metrics, which are not logged
        # again: the node sends it after them, so it is read before them.
        ended = read(self._remote, f"{there}/{ENDED}", JobEnd)
        scratch = read(self._remote, f"{there}/{SCRATCH}", Contents)
        with self._store.explained(f"take the files of {self._order.job} into {self._work}"):
            for name in GROWING:
                self._append(name, check)
            if scratch and scratch.files != self._scratch:
                self._take_scratch(scratch.files, check)
            if ended:
                if product := read(self._remote, f"{there}/{PRODUCT}", Contents):
                    if NOT_MADE & {name.split("/")[0] for name in product.files}:
                        raise StoreError(f"{self._remote.address}/{there} names files that no stage makes")
                    self._remote.receive(product.files, self._work, check)
                self._folder.write_end(ended)
                self._has_all = True

    def close(self) -> None:
        """Delete the job's objects; the blobs are collected like others that no record names."""
        for listed in [*self._remote.objects.below(self._there)]:
            self._remote.objects.delete(listed.name)

    def _append(self, name: str, check: Callable[[], None]) -> None:
        there = f"{self._there}/{self._number}/{name}"
        listed = self._remote.objects.written(there, check)
        if not listed or listed.size_bytes <= self._taken[name]:
            return
        with (self._work / name).open("ab") as stream:

            def take(chunk: bytes) -> None:
                stream.write(chunk)
                stream.flush()
                # After each chunk, since the next one may fail.
                self._taken[name] += len(chunk)

            self._remote.objects.receive(there, listed.size_bytes, take, check, first=self._taken[name])

    def _take_scratch(self, files: Files, check: Callable[[], None]) -> None:
        """Replace the scratch folder by the job's; a crash leaves the old one, the new one or none, never a part."""
        fresh, old = self._folder.path / SCRATCH_FOLDER, self._folder.path / "old"
        here = self._work / SCRATCH_FOLDER
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir()
        for name, entry in files.items():
            if self._scratch.get(name) == entry and (here / name).exists():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(here / name, fresh / name)
        self._remote.receive(files, fresh, check)
        with suppress(FileNotFoundError):
            here.rename(old)
        fresh.rename(here)
        shutil.rmtree(old, ignore_errors=True)
        self._scratch = files


def _record_in(folder: Path) -> Record:
    artifact = read_artifact(folder)
    if artifact is None:
        raise StoreError(f"sending an input of a job: {folder} is no whole artifact; build its stage again")
    return artifact.record


def scratch_of(files: Files) -> dict[str, FileEntry]:
    """Return those of a work folder's files that lie in its scratch folder, relative to that."""
    folder = f"{SCRATCH_FOLDER}/"
    return {name.removeprefix(folder): entry for name, entry in files.items() if name.startswith(folder)}


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, without what goes at this moment."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


def size_of(file: Path) -> int:
    """Return a file's size in bytes; 0 without the file."""
    return file.stat().st_size if file.exists() else 0
