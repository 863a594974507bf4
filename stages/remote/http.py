"""Checks of HTTP answers with a file or a part of one, and retries of servers that are busy or break off.

Retries wait ever longer, or as long as the server asks, a few times in a row. Not tenacity: its count of attempts
cannot start again when a transfer progresses between two failures.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from stages.core.errors import DownloadError, TransientError
from stages.core.redaction import quoted, shortened
from stages.remote.http_answers import number_in

if TYPE_CHECKING:
    import httpx


NUM_ATTEMPTS = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
_BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
QUOTED_CHARACTERS = 100
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def check_status(status: int, headers: Mapping[str, str], doing: str, token_variable: str) -> None:
    """Raise BusyError for a status that is worth another attempt, DownloadError for a refusal."""
    if 200 <= status < 300:
        return
    if busy := busy_from_status(status, headers):
        raise busy
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        advice = f"set {token_variable} to a token that may read it"
    else:
        advice = "check that the repository still has this revision"
    raise DownloadError(f"{doing}: the server answered {status}; {advice}")


def check_part(response: httpx.Response, start: int, size_bytes: int, doing: str) -> None:
    """Check, before anything is read, that an answer is a file of `size_bytes` from byte `start` on.

    A whole file may come without a length; then its reader counts. Raises DownloadError.
    """
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        content_range = response.headers.get("content-range", "")
        part = _PART.fullmatch(content_range)
        is_right = part is not None and (int(part[1]), int(part[3])) == (start, size_bytes)
        sent = f"a part with the Content-Range {quoted(content_range, QUOTED_CHARACTERS)}"
    else:
        length = response.headers.get("content-length")
        is_right = start == 0 and (length is None or number_in(length) == size_bytes)
        sent = f"{shortened(length or 'all', QUOTED_CHARACTERS)} bytes from the beginning"
    if not is_right:
        raise DownloadError(
            f"{doing}: the hub listed {size_bytes} bytes, of which those from byte {start} on were asked for, but the "
            f"server sends {sent}; the hub, a mirror or a proxy is wrong"
        )


class BusyError(Exception):
    """Raised when the server may answer a later attempt."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RetryBackoff:
    """Backoff that counts an activity's failures in a row."""

    def __init__(self, doing: str, stop: threading.Event | None = None, num_attempts: int = NUM_ATTEMPTS) -> None:
        self._doing = doing
        self._stop = stop or threading.Event()
        self._num_attempts = num_attempts
        self._failures = 0

    def progressed(self) -> None:
        """Count from zero again: the server is alive."""
        self._failures = 0

    def wait(self, busy: BusyError) -> None:
        """Sleep before the next attempt. Raises TransientError when it is no use to try again now."""
        self._failures += 1
        wait_s = busy.retry_after_s if busy.retry_after_s is not None else FIRST_WAIT_S * 2 ** (self._failures - 1)
        if wait_s > LONGEST_WAIT_S:
            raise TransientError(f"{self._doing}: {busy}, and asks to wait {wait_s:.0f} s; try again then") from busy
        if self._failures == self._num_attempts:
            tried = f" ({self._num_attempts} attempts)" if self._num_attempts > 1 else ""
            raise TransientError(f"{self._doing}: {busy}{tried}; check the network, or try again later") from busy
        self._stop.wait(wait_s)


def busy_from_status(status: int, headers: Mapping[str, str]) -> BusyError | None:
    """Return the error of an HTTP status that is worth another attempt; None for other statuses."""
    if status not in _BUSY_STATUSES:
        return None
    return BusyError(f"the server answered {status}", number_in(headers.get("retry-after", "")))


def busy_from_transport(error: Exception) -> BusyError:
    """Return the error of a connection that failed or broke."""
    cause = shortened(str(error), 200)  # it may quote what the server sent
    return BusyError(f"the connection failed ({type(error).__name__}: {cause})")
