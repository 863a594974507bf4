"""Ends a stage whose processes wait for one another for ever, and leaves what each of them was doing in the log.

A collective that one process never enters holds all others, on gloo and NCCL alike, often until a person looks. Every
process watches itself: when a step takes too long it writes the stacks of its threads, waits for the others to do the
same, and ends with an error that is worth a retry, which goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from stages.core.contract import StageFailure
from stages.core.errors import TransientError
from stages.core.files import write_atomically

GRACE_S = 5.0
"""Between the stacks and the end: the first process that ends takes the others along."""
STDERR = 2


class Watchdog:
    """A thread that expects `begins` to be called again before `timeout_s` have passed, while in its context."""

    def __init__(self, work: Path, timeout_s: float) -> None:
        self._work = work
        self._timeout_s = timeout_s
        self._doing = ""
        self._deadline_s = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.begins("loading the model")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()

    def begins(self, doing: str) -> None:
        """Say what is done from now on, and allow it its time."""
        self._doing = doing
        self._deadline_s = time.monotonic() + self._timeout_s

    def _watch(self) -> None:
        while not self._ended.wait(max(0.0, self._deadline_s - time.monotonic())):
            if time.monotonic() >= self._deadline_s:
                self._give_up()

    def _give_up(self) -> None:
        rank = os.environ.get("RANK", "0")
        message = f"{self._doing} has taken more than {self._timeout_s:g} s (execution.hang_timeout_s)"
        # One write, so that the stacks of several processes do not mingle.
        os.write(STDERR, f"rank {rank}: {message}; its threads:\n{stacks()}\n".encode())
        if self._ended.wait(GRACE_S):
            return
        advice = "the stacks of all processes are in the log; the next attempt goes on from the last checkpoint"
        failure = StageFailure(error=TransientError.__name__, message=f"rank {rank}: {message}: {advice}")
        if not (self._work / "error.json").exists():
            with contextlib.suppress(OSError):  # a full disk: the log still says it
                write_atomically(self._work / "error.json", failure.model_dump_json(indent=2))
        os._exit(TransientError.exit_code)  # the main thread is held, and cannot raise


def stacks() -> str:
    """What every thread of this process is doing, the latest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
