"""Slots that limit how many stage processes run at once on this machine, over all refreshes of a lifecycle home.

A slot is a file lock, which the kernel releases when its holder dies; filelock would be no shorter for several.
Prefect's own `concurrency(…)` was measured and dropped: its lease outlives a killed flow by 67 s, and slots that were
held when the server restarted are never freed.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO


class Slots:
    """Slots 0 to `count` - 1 of this machine, as lock files in `folder`; stages hold some while they run."""

    POLL_S = 0.1

    def __init__(self, folder: Path, count: int):
        self.folder = folder
        self.count = count

    def acquire(self, wanted: int, waiting: Callable[[], None]) -> HeldSlots:
        """Wait until `wanted` slots are free, and hold them, first come, first served.

        waiting: called meanwhile; may raise. Only the holder of the turnstile lock collects slots, so that two
        half-served requests never block each other.
        """
        if wanted > self.count:
            raise ValueError(f"{wanted} slots wanted, there are {self.count}")
        self.folder.mkdir(parents=True, exist_ok=True)
        # Two requests that each held half of the slots would deadlock, so only one at a time collects.
        turnstile = self._lock("turnstile", waiting)
        held: dict[int, IO[str]] = {}
        try:
            while len(held) < wanted:
                held |= self._free_slots(wanted - len(held), taken=held.keys())
                if len(held) < wanted:
                    self._pause(waiting)
        except BaseException:
            HeldSlots(held).release()
            raise
        finally:
            turnstile.close()
        return HeldSlots(held)

    def num_free(self) -> int:
        if not self.folder.exists():
            return self.count
        free = HeldSlots(self._free_slots(self.count, taken=()))
        number = len(free.numbers)
        free.release()
        return number

    def _free_slots(self, wanted: int, taken: Collection[int]) -> dict[int, IO[str]]:
        locked: dict[int, IO[str]] = {}
        for number in range(self.count):
            if len(locked) < wanted and number not in taken:
                file = self._try_lock(str(number))
                if file:
                    locked[number] = file
        return locked

    def _lock(self, name: str, waiting: Callable[[], None]) -> IO[str]:
        while not (file := self._try_lock(name)):
            self._pause(waiting)
        return file

    def _try_lock(self, name: str) -> IO[str] | None:
        # The lock belongs to the open file, and is released when it is closed.
        file = (self.folder / name).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _pause(self, waiting: Callable[[], None]) -> None:
        waiting()
        time.sleep(self.POLL_S)


class HeldSlots:
    """Slots of this machine that a stage holds until `release` is called or this process dies."""

    def __init__(self, files: dict[int, IO[str]]):
        self._files = files

    @property
    def numbers(self) -> list[int]:
        """Return the slots' numbers, which are GPU indices on a machine with GPUs."""
        return sorted(self._files)

    def release(self) -> None:
        """Release the held slots; a second call does nothing."""
        for file in self._files.values():
            file.close()
        self._files = {}
