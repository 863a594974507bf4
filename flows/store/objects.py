"""Objects below a prefix of a bucket (`s3://`, `gs://`, `az://`), written under conditions, by obstore.

Credentials, and a server's address (`AWS_ENDPOINT_URL`), come from the environment only; no message shows them.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from stages.core.errors import ResourceError, StoreError, TransientError
from stages.core.redaction import quoted, redact, secrets_in
from stages.core.shipped import install_command

ADDRESS = re.compile(
    r"(?P<provider>s3|gs|az)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,62})(?P<prefix>(/[A-Za-z0-9._=-]+)*)/?"
)
"""Pattern of a shared store's address, which has no room for credentials."""
RETRIES = 6
RETRIED_FOR_S = 30.0
"""Limits on repeating a request that the storage refuses as too many (503 SlowDown), or does not answer."""
CONNECT_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 60.0
CHUNK_BYTES = 8 << 20
"""Size in bytes of the parts in which a large object is sent and received."""
MOST_PARTS = 9000
"""Largest number of parts in which an object is sent; S3 takes 10,000."""
PARTS_AT_A_TIME = 2
READ_BYTES = 64 << 20
"""Largest size in bytes of an object that is read at once; a record of 100,000 files has 15 MB."""
QUERY = re.compile(r"\?[^\s)]*")
"""Pattern of a URL's query, in which Azure has signatures."""
SHOWN_CHARACTERS = 400
STOP_INTERVAL_S = 0.2
"""Seconds between two looks, during a transfer, for a stop of the refresh."""


def go_on() -> None:
    """Let a transfer run to its end: the `check` of one that nothing stops."""


@dataclass(frozen=True)
class Listed:
    """Object in a listing: its name below the prefix, its size and the time of its last writing."""

    name: str
    size_bytes: int
    written: datetime


@dataclass(frozen=True)
class Held:
    """Content of a small object, with its tag (ETag), which changes whenever the object is written."""

    content: bytes
    tag: Mapping[str, str]


class Objects:
    """Objects below an address in object storage.

    Raises TransientError when the storage does not answer in time, StoreError when it refuses.
    """

    def __init__(self, address: str) -> None:
        """Open `s3://BUCKET/PREFIX` (or gs, az); nothing is asked yet. Raises ResourceError without obstore."""
        try:
            from obstore.store import from_url
        except ImportError:
            raise ResourceError(
                f"the store {address} needs the package obstore; `{install_command('shared-store')}` installs it"
            ) from None
        self.address = address
        plain = any(os.environ.get(name, "").startswith("http://") for name in ("AWS_ENDPOINT_URL", "AZURE_ENDPOINT"))
        limits: dict[str, Any] = {
            "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRIED_FOR_S)},
            "client_options": {
                "allow_http": plain,
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=IDLE_TIMEOUT_S),
            },
        }
        with self._explained("opening it"):
            self._store = from_url(address, **limits)

    def read(self, name: str) -> Held | None:
        """Return an object that is kept in memory; None when there is none. Raises StoreError for a large one."""
        import obstore

        with self._explained(f"reading {name}"):
            try:
                answer = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            num_bytes = answer.meta["size"]
            if num_bytes > READ_BYTES:
                raise StoreError(f"{self.address}/{name} has {num_bytes:,} bytes; expected at most {READ_BYTES:,}")
            return Held(bytes(answer.bytes()), _tag(answer.meta))

    def create(self, name: str, content: bytes) -> Held | None:
        """Write an object that does not exist (`If-None-Match: *`); return None, writing nothing, if it does."""
        return self._put(name, content, "create")

    def replace(self, name: str, content: bytes, held: Held) -> Held | None:
        """Write an object if it is still as it was read (`If-Match`); return None, writing nothing, if it is not.

        content: must differ from what it replaces, since equal contents have one tag.
        """
        return self._put(name, content, dict(held.tag))

    def swap(self, name: str, content: bytes, held: Held | None) -> Held | None:
        """Create an object if `held` is None, else replace it."""
        return self.create(name, content) if held is None else self.replace(name, content, held)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whatever is there."""
        import obstore

        with self._explained(f"writing {name}"):
            obstore.put(self._store, name, content)

    def send(self, name: str, file: Path, check: Callable[[], None]) -> None:
        """Write a file as an object, whatever is there: its name says its content.

        check: is called every 0.2 s; what it raises ends the transfer.
        """
        import obstore

        part_bytes = max(CHUNK_BYTES, file.stat().st_size // MOST_PARTS + 1)
        with self._explained(f"sending {name}"):
            _until(
                lambda: obstore.put_async(
                    self._store, name, file, chunk_size=part_bytes, max_concurrency=PARTS_AT_A_TIME
                ),
                check,
            )

    def receive(
        self, name: str, size_bytes: int, take: Callable[[bytes], object], check: Callable[[], None], first: int = 0
    ) -> None:
        """Hand an object's bytes from `first` to `size_bytes` to `take`, in chunks, each with a time limit of its own.

        check: is called every 0.2 s; what it raises ends the transfer.
        Raises TransientError without such an object, since a listing, or a copy of the bucket, may lag behind.
        """
        import obstore

        for start in range(first, size_bytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, size_bytes)
            with self._explained(f"receiving {name}"):
                try:
                    ask = partial(obstore.get_range_async, self._store, name, start=start, end=end)
                    chunk = bytes(_until(ask, check))
                except FileNotFoundError:
                    raise TransientError(
                        f"{self.address} does not have {name}, which a record names; run this again, and if it stays "
                        "away, build the artifact again with `--force`"
                    ) from None
            take(chunk)

    def written(self, name: str, check: Callable[[], None] = go_on) -> Listed | None:
        """Return an object's size and time of writing; None when there is none. check: as of `send`."""
        import obstore

        with self._explained(f"asking for {name}"):
            try:
                return _listed(_until(lambda: obstore.head_async(self._store, name), check))
            except FileNotFoundError:
                return None

    def below(self, folder: str) -> Iterator[Listed]:
        """Yield the objects below a folder."""
        import obstore

        with self._explained(f"listing {folder}"):
            for page in obstore.list(self._store, f"{folder}/"):
                yield from map(_listed, page)

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        import obstore

        with self._explained(f"deleting {name}"):
            try:
                obstore.delete(self._store, name)
            except FileNotFoundError:
                return

    def _put(self, name: str, content: bytes, mode: Any) -> Held | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._explained(f"writing {name}"):
            try:
                return Held(content, _tag(obstore.put(self._store, name, content, mode=mode)))
            except FileNotFoundError:
                if mode == "create":  # it is the bucket that is not there
                    raise
            except (AlreadyExistsError, PreconditionError):
                pass
        # A repeated request meets its own first one, whose answer was lost: then the object has our content.
        now = self.read(name)
        return now if now and now.content == content else None

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn errors of the storage library into StoreError or TransientError, in one sentence without secrets."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.BaseError, OSError, ValueError) as error:
            first = str(error).partition("\n")[0]
            shown = quoted(redact(QUERY.sub("", first), secrets_in(os.environ)), SHOWN_CHARACTERS)[1:-1]
            where = f"the shared store {self.address}, {doing}"
            if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
                raise StoreError(
                    f"{where}: the credentials of the environment may not do this ({shown}); check them"
                ) from None
            if isinstance(error, FileNotFoundError):
                raise StoreError(f"{where}: there is no such bucket ({shown}); make it, or name another") from None
            if isinstance(error, exceptions.GenericError):
                raise TransientError(
                    f"{where}: it gave no good answer in {RETRIED_FOR_S:g} s and {RETRIES} tries again ({shown}); "
                    "check the network and the limits of the bucket, and run this again"
                ) from None
            raise StoreError(f"{where}: {shown}") from None


def _until(request: Callable[[], Awaitable[Any]], check: Callable[[], None]) -> Any:
    """Return a request's answer; give the request up as soon as `check`, called every 0.2 s, raises."""

    async def waited() -> Any:
        answer = asyncio.ensure_future(request())
        while not answer.done():
            check()
            await asyncio.wait({answer}, timeout=STOP_INTERVAL_S)
        return answer.result()

    # `run` cancels the request after an exception. A thread that runs an event loop already takes no second one.
    with ThreadPoolExecutor(1) if _is_in_a_loop() else nullcontext() as helper:
        return helper.submit(asyncio.run, waited()).result() if helper else asyncio.run(waited())


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _tag(meta: Any) -> dict[str, str]:
    # A version of None is no version for obstore.
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _listed(meta: Any) -> Listed:
    return Listed(meta["path"], meta["size"], meta["last_modified"])
