"""What hubs of repositories have in common: their files are listed with digests, fetched over HTTP, and verified.

A snapshot's files gather in `scratch/`, which survives an interruption, and are moved when all of them are verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import httpx

from stages.core.contract import StageContext
from stages.core.errors import DownloadError
from stages.hubs.delivery import GIB, Progress, check_disk, size_bytes
from stages.hubs.fetch import Fetcher, Snapshot
from stages.hubs.hub import Request
from stages.hubs.selection import check_names, select_files
from stages.hubs.source import Source

SMALL_FILE_TIMEOUT_S = 30.0


class RepositoryHub(ABC):
    """A hub that lists a repository's files at a revision."""

    @abstractmethod
    def resolve_revision(self, request: Request) -> str: ...

    @abstractmethod
    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        """The files at a resolved revision. Raises like `resolve_revision`."""

    def requested(self, request: Request, revision: str) -> Snapshot:
        """Those of the files that a request takes."""
        snapshot = self.list_snapshot(request.source, revision)
        names = [file.name for file in snapshot.files]
        check_names(names, snapshot.source)
        selected = set(select_files(request, names))
        return replace(snapshot, files=tuple(file for file in snapshot.files if file.name in selected))

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        snapshot = self.requested(request, revision)
        # By revision: files of a branch that moved on between two attempts must not mix.
        arrivals = context.scratch / snapshot.revision
        arrivals.mkdir(exist_ok=True)
        check_disk(context.work, snapshot.size_bytes - size_bytes(arrivals))
        context.milestone(f"downloading {len(snapshot.files)} files, {snapshot.size_bytes / GIB:.3f} GiB")
        Fetcher(snapshot, arrivals, Progress(context, snapshot.size_bytes).add).fetch()
        arrivals.replace(folder)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        snapshot = self.list_snapshot(source, revision)
        file = next((file for file in snapshot.files if file.name == name), None)
        if file is None:
            return None
        try:
            answer = httpx.get(file.url, headers=snapshot.headers, follow_redirects=True, timeout=SMALL_FILE_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise DownloadError(f"fetching {name} of {source}: {error}; try again") from None  # it has the address
        return answer.text
