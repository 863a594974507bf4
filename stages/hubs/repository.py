"""Downloads of a repository's files from a hub: in parallel over HTTP, resumed, and verified by digest.

A snapshot's files gather in `scratch/`, which survives an interruption, and are moved when all are verified.
huggingface_hub itself downloads only into temporary files that a killed process leaves useless (since 1.x), compares
sizes and not digests, and waits as long as a server asks; hence the transfer is done here, for all hubs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from stages.core.contract import StageContext
from stages.core.errors import DownloadError, full_disk_named
from stages.core.redaction import shortened
from stages.hubs.delivery import (
    GIB,
    SMALL_FILE_BYTES,
    Progress,
    arrivals_folder,
    check_disk,
    check_small,
    move_into_place,
    size_bytes,
)
from stages.hubs.hub import Request, Source
from stages.hubs.listing import PARTIAL_SUFFIX, Digest, digest_of, digest_of_bytes, path_in, select_files
from stages.remote import http

NUM_CONNECTIONS = 4
MAX_SHOWN_CHARACTERS = 200
"""Largest number of characters of a file's name that a message shows."""
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ANSWER_LIMIT_S = 120.0
READ_LIMIT_S, CONNECT_LIMIT_S = 30.0, 10.0
LISTING_BYTES = 256 << 20
"""Largest size in bytes of a hub's list of files; that of a million files is smaller."""


class RepositoryHub(ABC):
    """Base of hubs that list a repository's files with digests (Hugging Face, ModelScope)."""

    @abstractmethod
    def resolve_revision(self, request: Request) -> str: ...

    @abstractmethod
    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        """Return the list of a repository's files at a revision. Raises the errors of `resolve_revision`."""

    def requested(self, request: Request, revision: str) -> Snapshot:
        """Return the list of a repository's files at a revision that a request selects for download."""
        snapshot = self.list_snapshot(request.source, revision)
        selected = set(select_files(request, [file.name for file in snapshot.files]))
        return replace(snapshot, files=tuple(file for file in snapshot.files if file.name in selected))

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        snapshot = self.requested(request, revision)
        arrivals = arrivals_folder(context, snapshot.revision)
        check_disk(context.work, snapshot.size_bytes - size_bytes(arrivals))
        context.milestone(f"downloading {len(snapshot.files)} files, {snapshot.size_bytes / GIB:.3f} GiB")
        Fetcher(snapshot, arrivals, Progress(context, snapshot.size_bytes).add).fetch()
        move_into_place(arrivals, {file.name for file in snapshot.files}, folder)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        snapshot = self.list_snapshot(source, revision)
        file = next((file for file in snapshot.files if file.name == name), None)
        if file is None:
            return None
        check_small(file.size_bytes, name, source)
        doing = f"fetching {shortened(name, 200)} of {source}"
        headers = {**snapshot.headers, "Accept-Encoding": "identity"}
        answer = ask_hub(doing, file.url, headers, "the hub's address", max_bytes=SMALL_FILE_BYTES)
        http.check_status(answer.status, answer.headers, doing, snapshot.token_variable)
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
) -> http.Answer:
    """Send a request to a hub's API, with retries while it is busy; return its answer, which may be a refusal.

    doing: begins messages. address: names what has a wrong address, such as `HF_ENDPOINT`. limit_s: of the then single
    attempt. httpx follows redirects, and sends `Authorization` to the same host alone. Raises DownloadError for an
    answer out of bounds, TransientError when the hub does not answer.
    """
    expected = http.Expected(f"{doing}: the hub", max_bytes, limit_s or ANSWER_LIMIT_S, DownloadError)
    backoff = http.RetryBackoff(doing, num_attempts=http.NUM_ATTEMPTS if limit_s is None else 1)
    timeout = httpx.Timeout(min(READ_LIMIT_S, expected.total_s), connect=min(CONNECT_LIMIT_S, expected.total_s))
    with http.httpx_client(follow_redirects=True, timeout=timeout) as client:
        while True:
            try:
                answer = http.ask_httpx(client, expected, "GET", url, headers=dict(headers))
                busy: http.BusyError | None = http.busy_from_status(answer.status, answer.headers)
                if busy is None:
                    return answer
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise DownloadError(f"{doing}: {error}; check {address}") from None  # its cause has the address
            except (httpx.TransportError, TimeoutError) as error:
                busy = http.busy_from_transport(error)
            backoff.wait(busy)


@dataclass(frozen=True)
class RemoteFile:
    """File of a repository as the hub lists it: name, size, expected digest and download address."""

    name: str
    size_bytes: int
    digest: Digest
    url: str


@dataclass(frozen=True)
class Snapshot:
    """Files of a repository at one revision. headers: for downloads; they may hold a token, and are never printed."""

    source: str
    revision: str
    files: tuple[RemoteFile, ...]
    token_variable: str
    headers: dict[str, str] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Fetcher:
    """Downloader of a repository's listed files into a folder, in parallel."""

    def __init__(self, snapshot: Snapshot, folder: Path, report: Callable[[int], None]) -> None:
        """Create a downloader. report: gets received bytes from several threads; negative numbers take bytes back."""
        self._snapshot = snapshot
        self._folder = folder
        self._report = report
        self._stop = threading.Event()
        # Sizes, ranges and digests are those of the stored bytes.
        headers = {**snapshot.headers, "Accept-Encoding": "identity"}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)

    def fetch(self) -> None:
        """Download the files that are missing in the folder, and verify their digests.

        Raises DownloadError for something else than the hub listed, TransientError when it does not answer or breaks
        off again and again, ResourceError when the disk is full. Partial files stay, to be resumed.
        """
        # So that no long download is left for the end, alone.
        largest_first = sorted(self._snapshot.files, key=lambda file: -file.size_bytes)
        with self._client, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            futures = [pool.submit(self._fetch_file, file) for file in largest_first]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                # Downloads that run already look at this before each chunk.
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch_file(self, file: RemoteFile) -> None:
        target = path_in(self._folder, file.name, self._snapshot.source)
        partial = path_in(self._folder, file.name + PARTIAL_SUFFIX, self._snapshot.source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.replace(partial)  # Verified again: a machine that died may have lost its last bytes.
        if partial.exists():
            self._report(partial.stat().st_size)
        with full_disk_named(f"receiving {file.name}", partial):
            self._receive_verified(file, partial)
        # A file gets its name only once it is verified.
        partial.replace(target)

    def _receive_verified(self, file: RemoteFile, partial: Path) -> None:
        """Download the missing rest of a file, and all of it again if the digest of the whole is wrong."""
        num_chances = 2 if partial.exists() else 1
        for _ in range(num_chances):
            self._receive_all(file, partial)
            if digest_of(partial, file.digest.algorithm) == file.digest:
                return
            self._discard(partial)
        raise DownloadError(
            f"{self._about(file)}: the content does not hash to the {file.digest.algorithm} {file.digest.hex} that the "
            "hub lists; the hub, a mirror or a proxy sends something else. Nothing of it was kept"
        )

    def _receive_all(self, file: RemoteFile, partial: Path) -> None:
        backoff = http.RetryBackoff(self._about(file), self._stop)
        while True:
            try:
                return self._receive(file, partial, backoff)
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise DownloadError(f"{self._about(file)}: {error}; check the hub's address") from error
            except httpx.TransportError as error:
                backoff.wait(http.busy_from_transport(error))
            except http.BusyError as busy:
                backoff.wait(busy)

    def _receive(self, file: RemoteFile, partial: Path, backoff: http.RetryBackoff) -> None:
        """Request the missing bytes of a file once, and append them."""
        num_there = partial.stat().st_size if partial.exists() else 0
        # `exists`: an empty file has to be created, too.
        if partial.exists() and num_there == file.size_bytes:
            return
        if num_there > file.size_bytes:
            self._discard(partial)
            num_there = 0
        headers = {"Range": f"bytes={num_there}-"} if num_there else {}
        with self._client.stream("GET", file.url, headers=headers) as response:
            http.check_status(response.status_code, response.headers, self._about(file), self._snapshot.token_variable)
            if num_there and response.status_code != httpx.codes.PARTIAL_CONTENT:
                self._discard(partial)  # A server may ignore the range and send everything.
                num_there = 0
            # Before anything is written: a server that sends more than the hub lists could fill the disk.
            http.check_part(response, num_there, file.size_bytes, self._about(file))
            self._write(response, file, partial, backoff)

    def _write(self, response: httpx.Response, file: RemoteFile, partial: Path, backoff: http.RetryBackoff) -> None:
        with partial.open("ab") as stream:
            for chunk in response.iter_raw():
                if self._stop.is_set():
                    raise StoppedError
                if stream.tell() + len(chunk) > file.size_bytes:
                    raise DownloadError(
                        f"{self._about(file)}: the hub lists {file.size_bytes} bytes, but the server sends more; the "
                        "hub, a mirror or a proxy is wrong"
                    )
                stream.write(chunk)
                self._report(len(chunk))
                backoff.progressed()
            num_there = stream.tell()
        if num_there < file.size_bytes:
            raise http.BusyError(f"the server stopped after {num_there} of {file.size_bytes} bytes")

    def _discard(self, partial: Path) -> None:
        self._report(-partial.stat().st_size)
        partial.unlink()

    def _about(self, file: RemoteFile) -> str:
        return f"downloading {shortened(file.name, MAX_SHOWN_CHARACTERS)} of {self._snapshot.source}"


class StoppedError(Exception):
    """Raised to stop the other downloads of a repository after one of its files failed."""
