"""Memory cgroups for tests of programs that the kernel kills for exceeding a limit."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNTED = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(name: str, limit_bytes: int) -> Iterator[Path]:
    """Make a memory cgroup (v1 or v2) with a limit, which processes join by writing their pid to its `cgroup.procs`."""
    is_v1 = (MOUNTED / "memory").is_dir()
    group = (MOUNTED / "memory" if is_v1 else MOUNTED) / name
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("this machine lets us make no memory cgroup")
    try:
        yield group
    finally:
        for _ in range(100):  # the last process may not be gone yet
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)
