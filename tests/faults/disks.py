"""Small file systems for tests that fill them or make them read-only, mounted in the session's mount namespace."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount a file system at `folder` until the end of the context."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(folder)], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Mount a disk of this size at `folder`, in memory (tmpfs)."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs"):
        yield


def fill_last_block(file: Path) -> None:
    """Add empty lines to a file until its last block is full: a full disk still has room there."""
    with file.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"\n")


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Keep a disk full until the end of the context, by a file of another program."""
    file = disk / "of-another-program"
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"\0" * (1 << 16))
    try:
        yield
    finally:
        file.unlink()
