"""Watchdog that ends a stage whose processes deadlock, after logging what each of them was doing.

A collective that one process never enters holds all others, on gloo and on NCCL, often until a person looks. Every
process watches itself: when a step takes too long it writes its threads' stacks, waits for the others to do the same,
and ends with a retryable error; the next attempt continues from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import TracebackType

from stages.core.contract import StageFailure
from stages.core.errors import TransientError
from stages.core.files import write_atomically

GRACE_S = 5.0
"""Seconds between a watchdog's dump of stacks and the end of its process, in which the other processes dump theirs."""
LOOK_EVERY_S = 1.0
"""Longest interval between two checks by the watchdog, in seconds, so that short time limits are enforced."""
STDERR = 2
STEP_TIMES = 3
"""Multiple of the longest recent training step beyond which a step counts as hanging."""
LEAST_STEP_LIMIT_S = 30.0
"""Smallest time limit of a training step: a busy machine or a slow disk can delay short steps by seconds."""
KNOWN_AFTER_STEPS, REMEMBERED_STEPS = 5, 50
"""Number of steps before time limits are learned (the first are slow), and of latest steps to learn from."""


class Watchdog:
    """Thread that ends the process if an announced activity, such as a training step, exceeds its time limit.

    That is `timeout_s`, or for a step three times the longest of the recent steps.
    """

    def __init__(self, work: Path, timeout_s: float, *, learns_step_times: bool = True) -> None:
        self._work = work
        self._timeout_s = timeout_s
        self._learns_step_times = learns_step_times
        self._step_times_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._doing = ""
        self._began_s = 0.0
        self._deadline_s = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.begins("loading the model")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()

    def begins(self, doing: str) -> None:
        self._begins(doing, self._timeout_s, "execution.hang_timeout_s")

    def begins_step(self, step: int) -> None:
        """Announce the beginning of a training step; its time limit is learned from recent steps of equal length."""
        limit_s = self._timeout_s
        if self._learns_step_times and len(self._step_times_s) >= KNOWN_AFTER_STEPS:
            limit_s = min(limit_s, max(LEAST_STEP_LIMIT_S, STEP_TIMES * max(self._step_times_s)))
        if limit_s < self._timeout_s:
            self._begins(f"step {step}", limit_s, f"{STEP_TIMES} step times, at least {LEAST_STEP_LIMIT_S:g} s")
        else:
            self.begins(f"step {step}")

    def has_stepped(self) -> None:
        self._step_times_s.append(time.monotonic() - self._began_s)

    def _begins(self, doing: str, limit_s: float, why: str) -> None:
        self._doing = f"{doing} has taken more than {limit_s:g} s ({why})"
        self._began_s = time.monotonic()
        # last: once it has passed, the watching thread reports what the fields above say
        self._deadline_s = self._began_s + limit_s

    def _watch(self) -> None:
        while not self._ended.wait(min(LOOK_EVERY_S, max(0.0, self._deadline_s - time.monotonic()))):
            if time.monotonic() >= self._deadline_s:
                self._give_up()

    def _give_up(self) -> None:
        rank = os.environ.get("RANK", "0")
        message, deadline_s = self._doing, self._deadline_s
        # One write, so that the stacks of several processes do not mingle.
        os.write(STDERR, f"rank {rank}: {message}; its threads:\n{stacks()}\n".encode())
        if self._ended.wait(GRACE_S) or self._deadline_s != deadline_s:
            return  # it went on after all: slow, or stopped for a while
        advice = "the stacks of all processes are in the log; the next attempt goes on from the last checkpoint"
        failure = StageFailure(error=TransientError.__name__, message=f"rank {rank}: {message}: {advice}")
        if not (self._work / "error.json").exists():  # another rank may have been first
            with contextlib.suppress(OSError):  # a full disk: the log still says it
                write_atomically(self._work / "error.json", failure.model_dump_json(indent=2))
        os._exit(TransientError.exit_code)  # the main thread is held, and cannot raise


def stacks() -> str:
    """Return the stacks of all threads of this process, the latest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
