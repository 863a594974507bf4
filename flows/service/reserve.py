"""Reserve of disk space, given away when the disk is full, so that a failure can still be recorded, once and plainly.

Without it the end of a refresh is lost, or notified several times: Prefect's server hands on the event of a state
before it commits the state, and a client whose commit failed sets the state again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flows.ledger.home import home

RESERVE_BYTES = 32 << 20
"""Size of the reserve: far more than ledgers and databases need to record that a night failed."""
LOW_BYTES = 4 << 20
"""Free space below which the reserve is given away; SQLite's log and the database need some MiB together."""
PLENTY_BYTES = 512 << 20
"""Free space from which on the reserve is made again; a smaller disk has none."""


def keep_reserve() -> None:
    """Give the reserve away when the disk of the home is full, and make it again when there is plenty of space."""
    file = reserve_file()
    free_bytes = shutil.disk_usage(home()).free
    is_made = file.exists()
    if is_made and free_bytes < LOW_BYTES:
        file.unlink()
        print(f"the disk of {home()} is full: {RESERVE_BYTES >> 20} MiB kept for this are free now", flush=True)
    elif not is_made and free_bytes >= PLENTY_BYTES:
        # A sparse file would reserve nothing.
        with file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)


def reserve_file() -> Path:
    """Return the path of the reserve in this home; it may not exist."""
    return home() / "reserve"
