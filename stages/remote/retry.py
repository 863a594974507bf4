"""When a busy or broken server is asked again: a few times, waiting ever longer, or as long as the server asks.

Not tenacity: its count of attempts cannot start again when a transfer progresses between two failures.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from stages.core.errors import TransientError
from stages.core.redaction import shortened
from stages.remote.http_answers import number_in

NUM_ATTEMPTS = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0

_BUSY_STATUSES = (408, 429, 500, 502, 503, 504)


class BusyError(Exception):
    """The server may answer when asked again."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RetryBackoff:
    """Counts the failures in a row of one activity."""

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
    """The error of an HTTP status that is worth another attempt."""
    if status not in _BUSY_STATUSES:
        return None
    return BusyError(f"the server answered {status}", number_in(headers.get("retry-after", "")))


def busy_from_transport(error: Exception) -> BusyError:
    """The error of a connection that failed or broke."""
    cause = shortened(str(error), 200)  # it may quote what the server sent
    return BusyError(f"the connection failed ({type(error).__name__}: {cause})")
