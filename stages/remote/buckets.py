"""Access to object storage (`s3://`, `gs://`, `az://`) by pyarrow: listing objects and reading parts of them.

Credentials, and a server's address (`AWS_ENDPOINT_URL`), come from the environment only.
"""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.core.errors import DataError, DownloadError, TransientError
from stages.core.redaction import quoted
from stages.remote.pointers import Pointer

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem


NUM_CONNECTIONS = 16
RETRIED_FOR_S = 30.0
"""Time limit in seconds for retries in Google's storage library, whose own limit is 15 minutes."""
RETRIED_WITHOUT_CREDENTIALS_S = 5.0
"""Time limit in seconds for retries without credentials, which only Google's machines provide then."""
DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|UNAUTHENTICATED|PERMISSION_DENIED"
    r"|UNAUTHORIZED|FORBIDDEN|\b40[13]\b|[Cc]redential|Authorization|AuthenticationException|Base64",
)
NO_TOKEN = re.compile(r"OAuth2 access token")
"""Pattern of the error message of Google's library when it has no access token, for whatever reason."""
MISSING = re.compile(r"NO_SUCH_|NOT_FOUND|\b404\b|No such file|does not exist")
AZURE_ACCOUNT, AZURE_KEY = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"
AZURE_SAS_TOKEN = "AZURE_STORAGE_SAS_TOKEN"  # noqa: S105 - the name of a variable
CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": (AZURE_ACCOUNT, AZURE_KEY),
}


@dataclass(frozen=True)
class StoredObject:
    """Object in a bucket, with its size and a tag (such as the ETag) that changes with its content."""

    path: str
    size_bytes: int
    tag: str


class Bucket:
    """Location in object storage (a bucket, prefix or single object), opened by its address."""

    def __init__(self, address: str) -> None:
        """Open `s3://BUCKET/PATH` (or gs, az). Raises DownloadError if the environment lacks settings for it."""
        self.address = address
        provider, _, self.path = address.partition("://")
        with explained(address):
            self.filesystem = FILESYSTEMS[provider](self.path.partition("/")[0])

    def objects(self) -> dict[str, StoredObject]:
        """Return the object at the address, or all objects below the prefix that are not hidden, by name.

        Raises DownloadError when there is none or they may not be read, TransientError without an answer.
        """
        from pyarrow.fs import FileSelector, FileType

        with explained(self.address):
            (found,) = self.filesystem.get_file_info([self.path])
            if found.type == FileType.File:
                files = {found.base_name: found.path}
            else:
                below = self.filesystem.get_file_info(FileSelector(self.path, recursive=True))
                files = {self._name(one.path): one.path for one in below if one.type == FileType.File}
            # Hidden at any depth: `.cache/a` and `a/.b` are both left out.
            files = {name: path for name, path in files.items() if "/." not in f"/{name}"}
            if not files:
                raise DownloadError(f"{self.address} holds nothing; check the name of the bucket and the prefix")
            # pyarrow's listing has no ETags: each object is asked for its own.
            with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
                return dict(sorted(zip(files, pool.map(self.look_at, files.values()), strict=True)))

    def look_at(self, path: str) -> StoredObject:
        """Return an object's current size and tag; pyarrow's errors, and DownloadError for a malformed answer."""
        with self.filesystem.open_input_file(path) as stream:
            num_bytes, tag = stream.size(), _tag(stream.metadata())
        if num_bytes < 0 or not tag:
            raise DownloadError(
                f"asking for {self.address}: the server says of {quoted(path, 200)} that it has {num_bytes} bytes, and "
                f"{f'the ETag {quoted(tag, 100)}' if tag else 'no ETag'}; expected both of an object. Check the server "
                "(AWS_ENDPOINT_URL)"
            )
        return StoredObject(path, num_bytes, tag)

    def _name(self, path: str) -> str:
        """Return an object's name below the opened prefix; raise DownloadError if it is elsewhere."""
        name = path.removeprefix(f"{self.path}/")
        if name == path:
            raise DownloadError(
                f"asking for {self.address}: the server lists {quoted(path, 200)}, which lies somewhere else; check "
                "the server (AWS_ENDPOINT_URL)"
            )
        return name


@contextmanager
def opened(pointer: Pointer) -> Iterator[io.RawIOBase]:
    """Open an object in a bucket for reading at any position, given its address, size and tag (`Pointer`).

    Ranges are requested by name alone, so an object that is replaced meanwhile is only detected at the end.
    """
    bucket = Bucket(pointer.address)
    _check(bucket, pointer)
    with explained(pointer.address):
        stream = bucket.filesystem.open_input_file(bucket.path)
    with stream:
        try:
            yield _ObjectFile(stream, pointer.address)
        except DataError:
            _check(bucket, pointer)  # if the object has changed, this error is the cause
            raise
        _check(bucket, pointer)


class _ObjectFile(io.RawIOBase):
    """Object of a bucket opened for reading, which turns errors of the storage library into errors with advice."""

    def __init__(self, stream: NativeFile, address: str) -> None:
        self._stream = stream
        self._address = address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with explained(self._address):
            return int(self._stream.readinto(buffer))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())


def _check(bucket: Bucket, pointer: Pointer) -> None:
    """Raise DownloadError if an object in a bucket has changed since its pointer file was written."""
    with explained(pointer.address):
        now = bucket.look_at(bucket.path)
    if (now.size_bytes, now.tag) != (pointer.size_bytes, pointer.tag):
        raise DownloadError(
            f"{pointer.address} changed: it had {pointer.size_bytes:,} bytes (ETag {pointer.tag}) when its download "
            f"was planned, and has {now.size_bytes:,} now (ETag {now.tag}); run the refresh again, which takes what is "
            "there, once what writes it is done"
        )


def check_listening(address: str, limit_s: float) -> None:
    """Raise TransientError if an S3 server accepts no connection within `limit_s` seconds.

    pyarrow tries for six seconds, and lets no process end meanwhile.
    """
    provider, _, path = address.partition("://")
    if provider != "s3":
        return
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    url = urlsplit(named or f"https://{path.partition('/')[0]}.s3.amazonaws.com")
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname or "", port), limit_s).close()
    except OSError as error:
        raise TransientError(f"asking for {address}: {url.hostname} does not answer at port {port}: {error}") from None


def _tag(metadata: Mapping[str | bytes, Any]) -> str:
    """Return an object's ETag or generation number, else ""; two contents within a second have the same time."""
    values = {_text(name).lower(): _text(value).strip('"') for name, value in metadata.items()}
    return values.get("etag") or values.get("generation") or ""


def _text(value: str | bytes) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Turn errors of a storage library into DownloadError or TransientError with advice."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, ArrowException) as error:  # ArrowException: errors that pyarrow does not classify
        message = " ".join(str(error).split()).partition(" error_info=")[0]  # Google's library repeats it there
        shown = quoted(message, 600)[1:-1]
        if _is_denied(message, address):
            raise DownloadError(f"{address} may not be read: {_credentials(address)} ({shown})") from None
        if isinstance(error, FileNotFoundError) or MISSING.search(message):
            raise DownloadError(
                f"{address} does not exist ({shown}); check the name of the bucket and the path"
            ) from None
        if not isinstance(error, OSError):
            raise DownloadError(f"{address} cannot be asked for: {shown}") from None
        raise TransientError(f"asking for {address}: {shown}; check the network, or try again later") from None


def _is_denied(message: str, address: str) -> bool:
    """Return whether an error message means that credentials are missing or wrong; False if that is unclear."""
    if NO_TOKEN.search(message):
        return "UNAVAILABLE" not in message or bool(_missing_credentials(address))
    return bool(DENIED.search(message))


def _credentials(address: str) -> str:
    """Return advice about credentials for an error message, depending on which are set."""
    if missing := _missing_credentials(address):
        return f"the environment has no {' and no '.join(missing)}; set credentials that may read it"
    return f"the credentials of the environment ({', '.join(_variables(address))}) are not accepted; check them"


def _missing_credentials(address: str) -> list[str]:
    return [name for name in _variables(address) if not os.environ.get(name)]


def _variables(address: str) -> tuple[str, ...]:
    """Return the names of the variables with credentials for a bucket; with Azure, a SAS token replaces the key."""
    names = CREDENTIALS[address.partition("://")[0]]
    replaced = {AZURE_KEY: AZURE_SAS_TOKEN} if os.environ.get(AZURE_SAS_TOKEN) else {}
    return tuple(replaced.get(name, name) for name in names)


def _s3(bucket: str) -> FileSystem:
    from pyarrow.fs import FileSystem

    return FileSystem.from_uri(f"s3://{bucket}")[0]  # unlike the class, this hears AWS_ENDPOINT_URL


def _gs(bucket: str) -> FileSystem:
    from pyarrow.fs import GcsFileSystem

    limit_s = RETRIED_WITHOUT_CREDENTIALS_S if _missing_credentials("gs://") else RETRIED_FOR_S
    return GcsFileSystem(retry_time_limit=timedelta(seconds=limit_s))


def _az(container: str) -> FileSystem:
    from pyarrow.fs import AzureFileSystem

    account = os.environ.get(AZURE_ACCOUNT)
    if not account:
        raise DownloadError(f"az:// needs the account's name; set {AZURE_ACCOUNT}")
    key, sas_token = os.environ.get(AZURE_KEY), os.environ.get(AZURE_SAS_TOKEN)
    return AzureFileSystem(account, account_key=None if sas_token else key, sas_token=sas_token)


FILESYSTEMS: dict[str, Callable[[str], FileSystem]] = {"s3": _s3, "gs": _gs, "az": _az}
