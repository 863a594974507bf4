"""Sampling of served conversations into dataset rows: a share of them, without personal data, in limited disk space.

`<folder>/requests-<UTC time>-<process>.jsonl` has rows of the format `messages`, and never changes; one being written
is hidden (`.requests-…`), so that no dataset holds half a row. Rows hold the conversation, the tools that were offered,
and the version that answered: no header, no key, no user. Conversations with pictures, those that no training would
read, and answers that were cut off are left out.
"""

import fcntl
import json
import os
import queue
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from stages.core.errors import DataError, ResourceError
from stages.core.lines import print_timed
from stages.core.redaction import redact
from stages.data.formats import RowReader
from stages.data.messages import RowError
from stages.data.personal_data import KINDS, redacted
from stages.serving.exchange import Exchange

WHOLE = ("stop", "tool_calls")
"""Finish reasons of complete answers; others, such as `length`, were cut off."""
MAX_ROW_BYTES = 2**20
MAX_WAITING = 32
"""Largest number of sampled conversations that wait to be written; further ones are dropped."""
NUM_FILES = 8
"""Approximate number of files within the disk limit, at which each new file replaces the oldest one."""
FILE_AGE_S = 3600.0
OPEN_PREFIX = "."
NAME = "requests-"


class Samples:
    """Context manager that stores a share (0 to 1) of the served conversations as dataset rows, in its own thread.

    max_bytes: of all files; the oldest are removed for new ones. random_seed: of the choice; None: a new one each time.
    """

    def __init__(self, folder: Path, share: float, max_bytes: int, random_seed: int | None = None) -> None:
        self._folder = folder
        self._share = share
        self._max_bytes = max_bytes
        self._numbers = random.Random(random_seed)  # noqa: S311 (no secret)
        self._waiting: queue.Queue[tuple[Exchange, str] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
        self._file: BinaryIO | None = None
        self._began_s = 0.0
        self._has_dropped = False
        self._num_written = 0
        self._num_left_out = 0

    def __enter__(self) -> Self:
        """Start the thread that writes samples. Raises ResourceError if the folder is not writable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._complete_leftovers()
        except OSError as error:
            raise ResourceError(f"sampling requests into {self._folder}: {error}; choose another folder") from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._thread.join()
        print_timed(f"{self._num_written} conversations were written to {self._folder}, {self._num_left_out} left out")

    def draws(self) -> bool:
        return self._numbers.random() < self._share

    def take(self, exchange: Exchange, version: str) -> None:
        """Queue a conversation and the model version that answered it for writing. Returns at once."""
        with suppress(queue.Full):  # a sample may miss some, and an answer must not wait for a disk
            self._waiting.put_nowait((exchange, version))

    def _write_all(self) -> None:
        try:
            while waiting := self._next():
                row = row_of(*waiting)
                if row:
                    self._write(row)
                    self._num_written += 1
                else:
                    self._num_left_out += 1
            self._close()
        except Exception as error:  # such as a full disk, which must not disturb the requests being served
            # It still takes what comes: `__exit__` puts None into the queue, and would wait for room.
            print_timed(f"requests are not sampled any more: {self._folder}: {error!r}")
            while self._waiting.get():
                pass

    def _next(self) -> tuple[Exchange, str] | None:
        while True:
            left_s = self._began_s + FILE_AGE_S - time.monotonic() if self._file else None
            if left_s is not None and left_s <= 0:
                self._close()
                continue
            with suppress(queue.Empty):
                return self._waiting.get(timeout=left_s)

    def _write(self, row: bytes) -> None:
        if self._file is None:
            name = datetime.now(UTC).strftime(f"{NAME}%Y%m%dT%H%M%S.%fZ-{os.getpid()}.jsonl")
            # Unbuffered, so that a kill loses no row that was written.
            self._file = (self._folder / f"{OPEN_PREFIX}{name}").open("wb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # ours, while we live
            self._began_s = time.monotonic()
        self._file.write(row)
        if self._file.tell() >= self._max_bytes / NUM_FILES:
            self._close()

    def _close(self) -> None:
        """Publish a complete file of samples in the dataset, and remove the oldest files if the folder is full."""
        if self._file is None:
            return
        # Renamed under its lock, which the close gives up: no other process takes it for a leftover.
        path = Path(self._file.name)
        path.rename(path.with_name(path.name.removeprefix(OPEN_PREFIX)))
        self._file.close()
        self._file = None
        files = sorted(self._folder.glob(f"{NAME}*.jsonl"))  # names begin with the time: the oldest come first
        size = sum(file.stat().st_size for file in files)
        while files and size > self._max_bytes * (1 - 1 / NUM_FILES):  # leaves room for the next file
            size -= files[0].stat().st_size
            files.pop(0).unlink()
            if not self._has_dropped:
                print_timed(f"{self._folder} is full: for new requests, the oldest are removed")
            self._has_dropped = True

    def _complete_leftovers(self) -> None:
        """Complete sample files that a killed process left: cut off a half-written last row, and publish the rest."""
        for path in self._folder.glob(f"{OPEN_PREFIX}{NAME}*.jsonl"):
            with path.open("r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # another process writes it
                file.truncate(file.read().rfind(b"\n") + 1)  # to 0 bytes where no row is whole: -1 + 1
                path.rename(path.with_name(path.name.removeprefix(OPEN_PREFIX)))


def row_of(exchange: Exchange, version: str) -> bytes | None:
    """Return a conversation as a JSON line without personal data; None if it is incomplete or no valid training row."""
    choice = exchange.choices.get(0)
    messages = exchange.asked.get("messages")
    if choice is None or choice.finish_reason not in WHOLE or not isinstance(messages, list):
        return None
    row: dict[str, Any] = {"messages": [*map(_as_text, messages), choice.message], "version": version}
    if tools := exchange.asked.get("tools"):
        row["tools"] = tools
    if len(json.dumps(row)) > MAX_ROW_BYTES:
        return None
    try:
        row = redacted(_without_secrets(row), KINDS, Counter())
        RowReader("messages", "examples").read(row)
    except (RowError, DataError, RecursionError):
        return None
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _as_text(message: Any) -> Any:
    """Return a chat message with one text as content, where the client sent a list of text parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return message  # pictures: no reader of rows takes it
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}
