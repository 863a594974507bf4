"""The store: artifacts on disk. Nothing else writes under its root, but for stage processes in their work folders.

<kind>/<stage>-<version>/          an artifact, if its record.json is whole
.work/<kind>/<stage>-<resume key>/ work in progress; survives a crash
.cache/<kind>/                     kept between runs, keyed by content
.locks/                            one file a resume key; the kernel releases the lock of a dead process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.record import Artifact, Index, Record


class Store:
    """Artifacts under `root`, which is created when something is first written."""

    def __init__(self, root: Path):
        self.root = root.absolute()

    def find(self, kind: str, version: str) -> Artifact | None:
        """The committed artifact, or None. A torn record counts as not committed."""
        raise NotImplementedError

    def index(self) -> Index:
        """All artifacts."""
        raise NotImplementedError

    @contextmanager
    def lock(self, kind: str, resume_key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of a resume key. `waiting` is called every 0.2 s while another process holds it; may raise."""
        raise NotImplementedError
        yield

    def commit(self, work: Path, record: Record) -> Artifact:
        """Make a finished work folder the artifact of `record`, in place of an older one of the same version."""
        raise NotImplementedError
