"""Working directories of refreshes that a killed worker left in its folder."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from stages.core.supervisor import living_processes


def remove_left_folders(folder: Path) -> None:
    """Remove those in which no process works any more: a refresh outlives a killed worker, and goes on in its own."""
    in_use = set()
    for pid in living_processes():
        with suppress(OSError):
            directory = Path(f"/proc/{pid}/cwd").readlink()
            in_use |= {directory, *directory.parents}
    for left in folder.resolve().glob("tmp*prefect"):  # as Prefect's worker names them
        if left not in in_use:
            shutil.rmtree(left, ignore_errors=True)
