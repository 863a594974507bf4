"""Fetches the files of a hub snapshot over HTTP: several at once, resumed where they broke off, each verified.

huggingface_hub names the files, their digests and addresses, but downloads them itself only into temporary files that
a killed process leaves useless (since 1.x), compares sizes and not digests, and waits as long as a server asks; hence
the transfer is done here, for all hubs alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from stages.core.errors import DownloadError, full_disk_named
from stages.core.redaction import shortened
from stages.hubs.listing import PARTIAL_SUFFIX, path_in
from stages.hubs.verification import Digest, digest_of
from stages.remote.http import check_part, check_status
from stages.remote.retry import BusyError, RetryBackoff, busy_from_transport

NUM_CONNECTIONS = 4
MAX_SHOWN_CHARACTERS = 200
"""Of a file's name in a message."""
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it."""

    name: str
    size_bytes: int
    digest: Digest
    url: str


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at one revision. `headers` may hold a token: it is never printed."""

    source: str
    revision: str
    files: tuple[RemoteFile, ...]
    token_variable: str
    headers: dict[str, str] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class StoppedError(Exception):
    """Another file failed, so this one need not go on."""


class Fetcher:
    """Fetches the files of one snapshot into one folder."""

    def __init__(self, snapshot: Snapshot, folder: Path, report: Callable[[int], None]) -> None:
        """`report` is called, from several threads, with the bytes received, negative when they are thrown away."""
        self._snapshot = snapshot
        self._folder = folder
        self._report = report
        self._stop = threading.Event()
        headers = {**snapshot.headers, "Accept-Encoding": "identity"}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)

    def fetch(self) -> None:
        """Fetch what is not there yet.

        Raises DownloadError when the hub sends something else than it listed, TransientError when it does not answer
        or breaks off again and again, ResourceError when the disk is full. Partial files stay, to be resumed.
        """
        largest_first = sorted(self._snapshot.files, key=lambda file: -file.size_bytes)
        with self._client, ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            futures = [pool.submit(self._fetch_file, file) for file in largest_first]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
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
        partial.replace(target)

    def _receive_verified(self, file: RemoteFile, partial: Path) -> None:
        """Receive the rest of a file; what an earlier process left of it may be wrong and is then fetched again."""
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
        backoff = RetryBackoff(self._about(file), self._stop)
        while True:
            try:
                return self._receive(file, partial, backoff)
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise DownloadError(f"{self._about(file)}: {error}; check the hub's address") from error
            except httpx.TransportError as error:
                backoff.wait(busy_from_transport(error))
            except BusyError as busy:
                backoff.wait(busy)

    def _receive(self, file: RemoteFile, partial: Path, backoff: RetryBackoff) -> None:
        """One request for what is missing of a file."""
        num_there = partial.stat().st_size if partial.exists() else 0
        if partial.exists() and num_there == file.size_bytes:
            return
        if num_there > file.size_bytes:
            self._discard(partial)
            num_there = 0
        headers = {"Range": f"bytes={num_there}-"} if num_there else {}
        with self._client.stream("GET", file.url, headers=headers) as response:
            check_status(response.status_code, response.headers, self._about(file), self._snapshot.token_variable)
            if num_there and response.status_code != httpx.codes.PARTIAL_CONTENT:
                self._discard(partial)  # A server may ignore the range and send everything.
                num_there = 0
            # Before anything is written: a server that sends more than the hub lists could fill the disk.
            check_part(response, num_there, file.size_bytes, self._about(file))
            self._write(response, file, partial, backoff)

    def _write(self, response: httpx.Response, file: RemoteFile, partial: Path, backoff: RetryBackoff) -> None:
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
            raise BusyError(f"the server stopped after {num_there} of {file.size_bytes} bytes")

    def _discard(self, partial: Path) -> None:
        self._report(-partial.stat().st_size)
        partial.unlink()

    def _about(self, file: RemoteFile) -> str:
        return f"downloading {shortened(file.name, MAX_SHOWN_CHARACTERS)} of {self._snapshot.source}"
