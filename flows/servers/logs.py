"""Log files of programs that run for as long as the machine does: rotation, and lines with their time."""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

LOG_BYTES, NUM_LOGS = 10 * 2**20, 5


def now() -> str:
    """Return the local date and time with its zone, for lines of a log."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, after rotating it if it is long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate(path)
    return path.open("ab")


def rotate(path: Path) -> None:
    """Move a log of more than 10 MiB to `.1`, `.1` to `.2` and so on; the fifth is dropped.

    It is copied and cut, since a program may be writing to it: it appends, and goes on at the new end. Lines that it
    writes between the two are lost.
    """
    with contextlib.suppress(OSError):  # a full disk, say: the log stays, and so does the program
        if path.stat().st_size <= LOG_BYTES:
            return
        former = [path.with_name(f"{path.name}.{number}") for number in range(1, NUM_LOGS)]
        for older, old in reversed(list(zip(former[1:], former[:-1], strict=True))):
            if old.exists():
                old.replace(older)
        try:
            shutil.copyfile(path, former[0])
        except OSError:
            former[0].unlink(missing_ok=True)
            raise
        os.truncate(path, 0)


def say(text: str) -> None:
    """Write a line to the log; a full disk ends nothing."""
    with contextlib.suppress(OSError):
        print(f"{now()} {text}", flush=True)
