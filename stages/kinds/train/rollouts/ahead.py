"""Rounds of completions that are sampled on rank 0 while the model learns from earlier ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


class Stopwatch:
    """Stopwatch of a thread's seconds in `running`, which other threads may read meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended_s, self._since_s = 0.0, float("nan")
        self._runs = False

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._lock:
            self._since_s, self._runs = time.perf_counter(), True
        try:
            yield
        finally:
            with self._lock:
                self._ended_s, self._runs = self._ended_s + time.perf_counter() - self._since_s, False

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._ended_s + (time.perf_counter() - self._since_s if self._runs else 0.0)


class SamplingThread:
    """Thread that samples rounds one after another, in the order in which they are asked for; `close` it.

    One thread for the whole training: what it starts, such as a server, ends with it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "sampling")
        self._rounds: dict[int, tuple[Future[None], Callable[[], None]]] = {}
        self._works, self._is_waited_for = Stopwatch(), Stopwatch()
        self._last = (time.perf_counter(), 0.0, 0.0)

    def start(self, first_step: int, sample: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Let the round from `first_step` be sampled after all earlier ones. give_back: called if it never is."""
        self._rounds[first_step] = (self._pool.submit(self._timed, sample), give_back)

    def wait_for(self, first_step: int) -> None:
        """Wait until the round from `first_step` is sampled; raise what ended its sampling. One kept needs no wait."""
        if first_step in self._rounds:
            with self._is_waited_for.running():
                self._rounds.pop(first_step)[0].result()

    def wait_for_all(self) -> None:
        """Wait until no round is being sampled or waits for it; raise the first error."""
        with self._is_waited_for.running():
            for sampling, _ in self._rounds.values():
                sampling.result()

    def idle_shares(self) -> dict[str, float]:
        """Return the shares of the time since the last call in which trainer and sampler waited, as metrics."""
        now = (time.perf_counter(), self._works.seconds, self._is_waited_for.seconds)
        period_s, worked_s, waited_s = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return {"trainer_idle_share": waited_s / period_s, "sampler_idle_share": max(0.0, 1 - worked_s / period_s)}

    def close(self) -> None:
        """Drop rounds that wait, and wait for the end of the one that is being sampled, whose errors are dropped."""
        for sampling, give_back in self._rounds.values():
            if sampling.cancel():
                give_back()
        self._pool.shutdown()

    def _timed(self, sample: Callable[[], None]) -> None:
        with self._works.running():
            sample()
