"""Background lookups for the plan of a refresh (file hashes, hub revisions), all under one time limit.

What takes longer is left behind in its thread: it holds up neither the caller nor the end of the process.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from stages.core.errors import TransientError

PLANNING_LIMIT_S = 0.8
"""Time limit in seconds for all requests to hubs while a refresh is planned, so that a plan takes at most 2 s."""
PLANNING_OFFLINE_LIMIT_S = 10.0
"""Time limit in seconds for a plan's checks without network, which only a busy machine or a dead disk reaches."""
PLANNING_ATTEMPT_S = 0.6
"""Time limit in seconds for one request to a hub in a plan; shorter than for all, to fail with its own message."""

Answer = TypeVar("Answer")


class BackgroundLookups(Generic[Answer]):
    """Results of several slow lookups, made by threads under one time limit. limit_s: None for no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self._asked: dict[str, Future[Answer]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._asked

    def ask(self, name: str, work: Callable[[], Answer], *, here: bool = False) -> None:
        """Start a lookup in a thread. here: it is local, so without a limit it runs at once and obeys Ctrl-C."""
        future = self._asked[name] = Future()
        if here and self._limit_s is None:
            _run(work, future)
        else:
            threading.Thread(target=_run, args=(work, future), daemon=True).start()

    def of(self, name: str) -> Answer:
        """Return a started lookup's result; raise its error, or TransientError after the time limit."""
        left_s = None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
        try:
            return self._asked[name].result(left_s)
        except TimeoutError as error:
            raise TransientError(f"no answer within {self._limit_s:g} s; `lifecycle run` waits longer") from error


def _run(work: Callable[[], Answer], future: Future[Answer]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
