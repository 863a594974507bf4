"""Hubs of repositories: their files are listed with digests, fetched over HTTP, and verified.

A snapshot's files gather in `scratch/`, which survives an interruption, and are moved when all of them are verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx

from stages.core.contract import StageContext
from stages.core.errors import DownloadError
from stages.core.redaction import shortened
from stages.hubs.delivery import (
    GIB,
    SMALL_FILE_BYTES,
    Progress,
    arrivals_folder,
    check_disk,
    check_small,
    hand_over,
    size_bytes,
)
from stages.hubs.fetch import Fetcher, Snapshot
from stages.hubs.hub import Request
from stages.hubs.selection import select_files
from stages.hubs.source import Source
from stages.hubs.verification import digest_of_bytes
from stages.remote.http import check_status
from stages.remote.http_answers import Answer, Expected, ask_httpx, httpx_client
from stages.remote.retry import NUM_ATTEMPTS, BusyError, RetryBackoff, busy_from_status, busy_from_transport

ANSWER_LIMIT_S = 120.0
READ_LIMIT_S, CONNECT_LIMIT_S = 30.0, 10.0
LISTING_BYTES = 256 << 20
"""Largest list of files: those of a million files are smaller."""


class RepositoryHub(ABC):
    """A hub that lists a repository's files at a revision."""

    @abstractmethod
    def resolve_revision(self, request: Request) -> str: ...

    @abstractmethod
    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        """Return the files at a resolved revision. Raises like `resolve_revision`."""

    def requested(self, request: Request, revision: str) -> Snapshot:
        """Return those of the files that a request takes."""
        snapshot = self.list_snapshot(request.source, revision)
        selected = set(select_files(request, [file.name for file in snapshot.files]))
        return replace(snapshot, files=tuple(file for file in snapshot.files if file.name in selected))

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        snapshot = self.requested(request, revision)
        arrivals = arrivals_folder(context, snapshot.revision)
        check_disk(context.work, snapshot.size_bytes - size_bytes(arrivals))
        context.milestone(f"downloading {len(snapshot.files)} files, {snapshot.size_bytes / GIB:.3f} GiB")
        Fetcher(snapshot, arrivals, Progress(context, snapshot.size_bytes).add).fetch()
        hand_over(arrivals, {file.name for file in snapshot.files}, folder)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        snapshot = self.list_snapshot(source, revision)
        file = next((file for file in snapshot.files if file.name == name), None)
        if file is None:
            return None
        check_small(file.size_bytes, name, source)
        doing = f"fetching {shortened(name, 200)} of {source}"
        headers = {**snapshot.headers, "Accept-Encoding": "identity"}
        answer = ask_hub(doing, file.url, headers, "the hub's address", max_bytes=SMALL_FILE_BYTES)
        check_status(answer.status, answer.headers, doing, snapshot.token_variable)
        if digest_of_bytes(answer.body, file.digest.algorithm) != file.digest:
            raise DownloadError(
                f"{doing}: the content does not hash to the {file.digest.algorithm} {file.digest.hex} that the hub "
                "lists; the hub, a mirror or a proxy sends something else"
            )
        return answer.body.decode()


def ask_hub(
    doing: str,
    url: str,
    headers: Mapping[str, str],
    address: str,
    limit_s: float | None = None,
    max_bytes: int = LISTING_BYTES,
) -> Answer:
    """Ask a hub, again while it is busy; the answer may be a refusal.

    doing: begins messages. address: names what has a wrong address, such as `HF_ENDPOINT`. limit_s: of the one attempt
    that there is then. Redirects are followed, by httpx, which sends `Authorization` to the same host alone.
    Raises DownloadError for an answer out of bounds, TransientError when the hub does not answer.
    """
    expected = Expected(f"{doing}: the hub", max_bytes, limit_s or ANSWER_LIMIT_S, DownloadError)
    backoff = RetryBackoff(doing, num_attempts=NUM_ATTEMPTS if limit_s is None else 1)
    timeout = httpx.Timeout(min(READ_LIMIT_S, expected.total_s), connect=min(CONNECT_LIMIT_S, expected.total_s))
    with httpx_client(follow_redirects=True, timeout=timeout) as client:
        while True:
            try:
                answer = ask_httpx(client, expected, "GET", url, headers=dict(headers))
                busy: BusyError | None = busy_from_status(answer.status, answer.headers)
                if busy is None:
                    return answer
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise DownloadError(f"{doing}: {error}; check {address}") from None  # its cause has the address
            except (httpx.TransportError, TimeoutError) as error:
                busy = busy_from_transport(error)
            backoff.wait(busy)
