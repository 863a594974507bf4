"""Reserved disk space that is freed when the disk is full, so that a failing refresh can still record its end.

Without it the end of a refresh is lost, or notified several times: Prefect's server hands on the event of a state
before it commits the state, and a client whose commit failed sets the state again.
"""

import os
import shutil
from pathlib import Path

from flows.ledger.home import home
from stages.core.lines import print_timed

RESERVE_BYTES = 32 << 20
"""Size of the file of reserved disk space, far more than event logs and databases need to record one failure."""
LOW_BYTES = 4 << 20
"""Free bytes below which the reserve is deleted; SQLite's log and database need some MiB together."""
PLENTY_BYTES = 512 << 20
"""Free bytes from which the reserve is made again; a disk with less free space never has one."""


def keep_reserve() -> None:
    """Free the reserved disk space when the lifecycle home's disk is full; reserve it again when there is plenty."""
    file = reserve_file()
    free_bytes = shutil.disk_usage(home()).free
    is_made = file.exists()
    if is_made and free_bytes < LOW_BYTES:
        file.unlink()
        print_timed(f"the disk of {home()} is full: {RESERVE_BYTES >> 20} MiB kept for this are free now")
    elif not is_made and free_bytes >= PLENTY_BYTES:
        # A sparse file would reserve nothing.
        with file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)


def reserve_file() -> Path:
    """Return the path of the file that holds disk space in reserve for a full disk; the file may not exist."""
    return home() / "reserve"
