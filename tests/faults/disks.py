"""Small file systems for tests that fill disks or make them read-only, mounted in the session's mount namespace."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount a file system at `folder` until the `with` block ends; skip the test where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(folder)], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Mount a disk of this size, held in memory (tmpfs), at `folder` until the `with` block ends."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs"):
        yield


def fill_last_block(file: Path) -> None:
    """Append empty lines to a file until its last disk block is full, since even a full disk has room in that block."""
    with file.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"\n")


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Fill a disk with one large file until the `with` block ends, as another program might."""
    file = disk / "of-another-program"
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"\0" * (1 << 16))
    try:
        yield
    finally:
        file.unlink()
