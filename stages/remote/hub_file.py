"""A file of the Hugging Face hub as one that is read from any place on: a commit's files do not change.

Not huggingface_hub's filesystem: that asks for each block by itself, which the hub counts against its limit of
requests, and does not look whether a mirror sends something else than the hub lists.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

from stages.core.errors import DownloadError
from stages.remote.http import check_status, promised_bytes
from stages.remote.pointers import Pointer
from stages.remote.retry import BusyError, RetryBackoff, busy_from_transport

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<file>.+)")


def endpoint() -> str:
    """Address of the hub, or of a mirror."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def authorization() -> dict[str, str]:
    """The header that shows the hub the token of the environment, if there is one."""
    token = os.environ.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def opened(pointer: Pointer) -> Iterator[io.RawIOBase]:
    """What `open_file` gives."""
    from huggingface_hub import hf_hub_url

    named = ADDRESS.fullmatch(pointer.address)
    assert named, pointer
    url = hf_hub_url(named["name"], named["file"], repo_type="dataset", revision=named["commit"], endpoint=endpoint())
    headers = {**authorization(), "Accept-Encoding": "identity"}
    with (
        httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=True) as client,
        closing(_HubFile(client, url, pointer)) as file,
    ):
        yield file


class _HubFile(io.RawIOBase):
    """Reads on in one answer for as long as it is read on, and asks again where that breaks off."""

    def __init__(self, client: httpx.Client, url: str, pointer: Pointer) -> None:
        self._client = client
        self._url = url
        self._pointer = pointer
        self._doing = f"reading {pointer.address}"
        self._backoff = RetryBackoff(self._doing)
        self._position = 0
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._rest = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._pointer.size_bytes}[whence]
        if start + offset != self._position:
            self._leave()
            self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if not self._rest and self._position < self._pointer.size_bytes:
            self._rest = self._received()
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    def close(self) -> None:
        self._leave()
        super().close()

    def _received(self) -> bytes:
        """What comes next, at least a byte. Raises DownloadError, TransientError."""
        while True:
            try:
                if self._response is None:
                    self._ask()
                if chunk := next(self._chunks, b""):
                    self._backoff.progressed()
                    return chunk
                raise BusyError(f"the server stopped after {self._position} of {self._pointer.size_bytes} bytes")
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
                raise DownloadError(f"{self._doing}: {error}; check HF_ENDPOINT") from error
            except httpx.TransportError as error:
                busy = busy_from_transport(error)
            except BusyError as error:
                busy = error
            self._leave()
            self._backoff.wait(busy)

    def _ask(self) -> None:
        headers = {"Range": f"bytes={self._position}-"} if self._position else {}
        request = self._client.build_request("GET", self._url, headers=headers)
        self._response = self._client.send(request, stream=True)
        check_status(self._response, self._doing, TOKEN_VARIABLE)
        self._check_content(self._response)
        if self._position and self._response.status_code != httpx.codes.PARTIAL_CONTENT:
            raise DownloadError(
                f"{self._doing}: the server sends whole files only, where a part was asked for; download the dataset "
                "without `stream: true`"
            )
        self._chunks = self._response.iter_raw()

    def _check_content(self, response: httpx.Response) -> None:
        """Raises DownloadError where a mirror or a proxy has something else than the hub lists."""
        size_bytes = promised_bytes(response)
        headers = [one.headers for one in (*response.history, response)]
        digests = [one["x-linked-etag"].removeprefix("W/").strip('"') for one in headers if "x-linked-etag" in one]
        if size_bytes in (None, self._pointer.size_bytes) and set(digests) <= {self._pointer.tag}:
            return
        raise DownloadError(
            f"{self._doing}: the hub listed {self._pointer.size_bytes} bytes of the digest {self._pointer.tag}, but "
            f"the server sends {size_bytes} ({', '.join(digests) or 'no digest'}); a mirror or a proxy is wrong"
        )

    def _leave(self) -> None:
        """The answer at hand, which is of another place than what is wanted next."""
        self._chunks, self._rest = iter(()), b""
        if self._response is not None:
            self._response.close()
            self._response = None
