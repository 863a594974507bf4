"""Remote reading of dataset files on the Hugging Face hub, from any position, with verified content.

Not huggingface_hub's filesystem: that asks for each block by itself, which the hub counts against its limit of
requests, and does not look whether a mirror sends something else than the hub lists.

Every byte is vouched for by the digest that the hub listed, where a file is read from its beginning to its end, or by
the digest that an answer names; else it is refused.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

import httpx

from stages.core.errors import DownloadError
from stages.core.hashing import content_hasher
from stages.core.redaction import quoted
from stages.remote.http import BusyError, RetryBackoff, busy_from_transport, check_part, check_status
from stages.remote.pointers import Pointer

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
SHA256_DIGITS = 64
"""Number of hex digits of a sha256 digest; a shorter digest is a git blob id."""
QUOTED_CHARACTERS = 100
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<file>.+)")


def endpoint() -> str:
    """Return the address of the Hugging Face hub, or of the mirror in `HF_ENDPOINT`."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def token_in(variable: str) -> str:
    """Return the token in an environment variable; empty if it is not set. Raises DownloadError for an invalid one."""
    token = os.environ.get(variable, "")
    if not (token.isascii() and token.isprintable()):
        raise DownloadError(f"{variable} holds characters that no token has, such as the end of a line; set it again")
    return token


def authorization() -> dict[str, str]:
    """Return the HTTP header with the Hugging Face token of the environment; empty if there is none."""
    token = token_in(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def opened(pointer: Pointer) -> Iterator[io.RawIOBase]:
    """Open a file on the Hugging Face hub for reading at any position, given its address, size and tag (`Pointer`)."""
    from huggingface_hub import hf_hub_url

    named = ADDRESS.fullmatch(pointer.address)
    if not named:
        raise DownloadError(
            f"reading {quoted(pointer.address, QUOTED_CHARACTERS)}: that is no address of a file of the hub; expected "
            "hf://datasets/org/name@COMMIT/PATH. Download the dataset again"
        )
    url = hf_hub_url(named["name"], named["file"], repo_type="dataset", revision=named["commit"], endpoint=endpoint())
    # Positions and digests are those of the stored bytes.
    headers = {**authorization(), "Accept-Encoding": "identity"}
    with (
        httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=True) as client,
        closing(_HubFile(client, url, pointer)) as file,
    ):
        try:
            yield file
        except GeneratorExit:  # the caller stops reading before the end
            file.check_vouched()
            raise
        file.check_vouched()


class _HubFile(io.RawIOBase):
    """File on the Hugging Face hub, read from one HTTP answer, or from further ones after a broken connection."""

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
        self._begin_pass()
        self._is_vouched = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._pointer.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._doing}: there is no byte {start + offset}")
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

    def check_vouched(self) -> None:
        """Raise DownloadError if bytes were read from the remote file that no digest of the hub could verify."""
        if not self._is_vouched:
            raise DownloadError(
                f"{self._doing}: the server sends no x-linked-etag, and the file was not read from its beginning to "
                "its end, so what was read cannot be compared with the digest that the hub lists; download the "
                "dataset without `stream: true`"
            )

    def _begin_pass(self) -> None:
        """Start to hash the remote file's content from its first byte on, to verify what is read."""
        algorithm: Literal["sha256", "git-blob-sha1"] = "git-blob-sha1"
        if len(self._pointer.tag) == SHA256_DIGITS:
            algorithm = "sha256"
        self._hasher = content_hasher(algorithm, self._pointer.size_bytes)
        self._num_hashed = 0

    def _received(self) -> bytes:
        """Return the file's next bytes, at least one, with retries. Raises DownloadError, TransientError."""
        while True:
            try:
                if self._response is None:
                    self._ask()
                if chunk := next(self._chunks, b""):
                    self._backoff.progressed()
                    self._check_content(chunk)
                    return chunk
                raise BusyError(f"the server stopped after {self._position} of {self._pointer.size_bytes} bytes")
            except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
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
        self._response = response = self._client.send(request, stream=True)
        check_status(response.status_code, response.headers, self._doing, TOKEN_VARIABLE)
        if self._position and response.status_code != httpx.codes.PARTIAL_CONTENT:
            raise DownloadError(
                f"{self._doing}: the server sends whole files only, where a part was asked for; download the dataset "
                "without `stream: true`"
            )
        check_part(response, self._position, self._pointer.size_bytes, self._doing)
        if self._position == 0:
            self._begin_pass()
        if not self._names_digest(response):
            self._is_vouched = False
            if self._position != self._num_hashed:  # the digest of the whole will not be known
                self.check_vouched()
        self._chunks = response.iter_raw()

    def _names_digest(self, response: httpx.Response) -> bool:
        """Return whether headers, also of a redirect, name the hub's digest; raise DownloadError for another one.

        The hub itself names a small file's, which is not in its storage, as ETag.
        """
        headers = [answer.headers for answer in (*response.history, response)]
        digests = [one["x-linked-etag"] for one in headers if "x-linked-etag" in one]
        if not digests and len(self._pointer.tag) != SHA256_DIGITS:
            digests = [one["etag"] for one in headers[:1] if "etag" in one]
        named = {digest.removeprefix("W/").strip('"') for digest in digests}
        if named <= {self._pointer.tag}:  # empty, or the tag alone
            return bool(named)
        raise DownloadError(
            f"{self._doing}: the hub listed the digest {self._pointer.tag}, but the server's file has "
            f"{quoted(', '.join(sorted(named)), QUOTED_CHARACTERS)}; a mirror or a proxy is wrong"
        )

    def _check_content(self, chunk: bytes) -> None:
        """Count and hash received bytes before they are used. Raises DownloadError for wrong content or size."""
        end = self._position + len(chunk)
        is_end = end == self._pointer.size_bytes
        # At the expected end, nothing more may come.
        if end > self._pointer.size_bytes or (is_end and next(self._chunks, b"")):
            raise DownloadError(
                f"{self._doing}: the hub listed {self._pointer.size_bytes} bytes, but the server sends more; a mirror "
                "or a proxy is wrong"
            )
        if self._position != self._num_hashed:
            return
        self._hasher.update(chunk)
        self._num_hashed = end
        if is_end and self._hasher.hexdigest() != self._pointer.tag:
            raise DownloadError(
                f"{self._doing}: the content does not hash to {self._pointer.tag}, which the hub listed; the hub, a "
                "mirror or a proxy sends something else. Nothing that was made of it may be used"
            )
        # The whole file has the listed digest, and so has all that was read of it.
        self._is_vouched = self._is_vouched or is_end

    def _leave(self) -> None:
        """Close the current HTTP answer, because the next read is at another position."""
        self._chunks, self._rest = iter(()), b""
        if self._response is not None:
            self._response.close()
            self._response = None
