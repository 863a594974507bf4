"""Cluster job on a machine without this home's disk: its files pass through the shared store's bucket.

    jobs/<job>/parcel.json        what the job starts with (`Parcel`): the files of its work folder, as blobs
    jobs/<job>/heartbeat          changes every few seconds while the agent waits for the job
    jobs/<job>/<number>/<name>    of one start: log, metrics and events as they grow, `scratch.json` (the latest whole
                                  checkpoint), `product.json` (what the stage has made), and `ended.json`, the last

The agent is one end (`JobMirror`), a program on the node the other (`flows/launch/away_task.py`). The node has the
home's paths on an empty disk of its own, and receives the input artifacts from the shared store as another home would.
"""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from flows.launch.cluster_job import JobOrder
from flows.store.content import (
    LAUNCH_FOLDER,
    LOG_FILE,
    NOT_OF_THE_ARTIFACT,
    SCRATCH_FOLDER,
    SERIES,
    Files,
    hash_file,
)
from flows.store.objects import go_on
from flows.store.remote import SHARED_JOBS, Remote
from stages.core.errors import StoreError
from stages.core.fields import StrictModel
from stages.core.files import write_atomically

GROWING = (LOG_FILE, *sorted(SERIES))
"""Files that are copied while they grow; each end appends to them what the other has added."""
NOT_MADE = frozenset({*NOT_OF_THE_ARTIFACT, *GROWING, "config.json"})
"""Names in a work folder that are no part of what its stage makes, or are sent while it runs."""
PARCEL, SCRATCH, PRODUCT, ENDED, HEARTBEAT = "parcel.json", "scratch.json", "product.json", "ended.json", "heartbeat"


class Parcel(StrictModel):
    """Files of a folder whose contents are blobs of the shared store. number: of the job's starts, this one too."""

    number: int
    folder: Path
    files: Files


class JobMirror:
    """The agent's end of a job that runs away from this home."""

    def __init__(self, order: JobOrder) -> None:
        assert order.through
        self._order, self._work = order, order.work
        self._remote = Remote(order.through)
        self._there = f"{SHARED_JOBS}/{order.job}"
        self._number = 0
        self._taken: dict[str, int] = {}
        self._scratch: Parcel | None = None

    def send(self) -> None:
        """Send the work folder, before the job of this order is submitted once more."""
        self._number += 1
        self._scratch = None
        self._taken = {name: size_of(self._work / name) for name in GROWING}
        self.beat()
        names = [name for name in files_below(self._work) if name != f"{LAUNCH_FOLDER}/{ENDED}"]
        parcel = send_files(self._remote, self._work, names, self._number)
        self._remote.objects.write(f"{self._there}/{PARCEL}", parcel.model_dump_json().encode())

    def beat(self) -> None:
        self._remote.objects.write(f"{self._there}/{HEARTBEAT}", str(time.time_ns()).encode())

    def fetch(self) -> None:
        """Receive what the job has written since the last call; after its end also its product, and the end last."""
        # First: what comes after it is then whole.
        ended = self._remote.objects.read(f"{self._there}/{self._number}/{ENDED}")
        for name in GROWING:
            self._append(name)
        if parcel := self._parcel(SCRATCH):
            self._take_scratch(parcel)
        if ended:
            if product := self._parcel(PRODUCT):
                if NOT_MADE & {name.split("/")[0] for name in product.files}:
                    raise StoreError(f"{self._remote.address}/{self._there} names files that no stage makes")
                self._remote.receive(product.files, self._work)
            write_atomically(self._work / LAUNCH_FOLDER / ENDED, ended.content)

    def close(self) -> None:
        """Delete the job's objects; the blobs are collected like others that no record names."""
        for listed in [*self._remote.objects.below(self._there)]:
            self._remote.objects.delete(listed.name)

    def _append(self, name: str) -> None:
        there = f"{self._there}/{self._number}/{name}"
        listed, taken = self._remote.objects.written(there), self._taken[name]
        if listed and listed.size_bytes > taken:
            with (self._work / name).open("ab") as stream:
                self._remote.objects.receive(there, listed.size_bytes, stream.write, go_on, first=taken)
            self._taken[name] = listed.size_bytes

    def _parcel(self, name: str) -> Parcel | None:
        held = self._remote.objects.read(f"{self._there}/{self._number}/{name}")
        return Parcel.model_validate_json(held.content) if held else None

    def _take_scratch(self, parcel: Parcel) -> None:
        """Replace the scratch folder by a checkpoint of the job; a crash leaves the old one, the new one or none."""
        if parcel == self._scratch:
            return
        fresh, here = self._work / LAUNCH_FOLDER / SCRATCH_FOLDER, self._work / SCRATCH_FOLDER
        shutil.rmtree(fresh, ignore_errors=True)
        earlier = self._scratch.files if self._scratch else {}
        for name, entry in parcel.files.items():
            if earlier.get(name) == entry and (here / name).exists():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(here / name, fresh / name)
        self._remote.receive(parcel.files, fresh)
        shutil.rmtree(here, ignore_errors=True)
        fresh.rename(here)
        self._scratch = parcel


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def send_files(remote: Remote, folder: Path, names: Iterable[str], number: int) -> Parcel:
    """Send files as blobs, and return the parcel that lists them."""
    files = {name: hash_file(folder / name) for name in names}
    remote.send_files(files, folder, go_on)
    return Parcel(number=number, folder=folder, files=files)


def size_of(file: Path) -> int:
    """Return a file's size in bytes; 0 without the file."""
    return file.stat().st_size if file.exists() else 0
