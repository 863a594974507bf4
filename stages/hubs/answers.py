"""Background lookups for the plan of a refresh (file hashes, hub revisions), all under one time limit.

With a limit, what takes longer is left behind in its thread: it holds up neither the caller nor the end of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from stages.core.errors import TransientError

PLANNING_LIMIT_S = 0.8
"""Time limit in seconds for all requests to hubs while a refresh is planned, so that a plan takes at most 2 s."""
PLANNING_OFFLINE_LIMIT_S = 10.0
"""Time limit in seconds for checks that need no network while a refresh is planned. Hashes have `PLANNING_ATTEMPT_S`
each; everything else takes no time, unless the machine is busy or a disk does not answer."""
PLANNING_ATTEMPT_S = 0.6
"""Time limit in seconds for one request to a hub while a refresh is planned. It is shorter than the limit for all, so
that the request fails by itself with its own error message."""

Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Results of several slow lookups, such as hub revisions, made by threads under one time limit.

    limit_s: None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self._asked: dict[str, Future[Answer]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._asked

    def ask(self, name: str, work: Callable[[], Answer], *, here: bool = False) -> None:
        """Start a lookup in a thread, such as that of a model's current revision on a hub.

        here: the work is local, so without a limit it runs at once and obeys Ctrl-C.
        """
        future = self._asked[name] = Future()
        if here and self._limit_s is None:
            _run(work, future)
        else:
            threading.Thread(target=_run, args=(work, future), daemon=True).start()

    def of(self, name: str) -> Answer:
        """Wait for a lookup that was started, and return its result.

        Raises the error that occurred, or TransientError after the time limit.
        """
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
