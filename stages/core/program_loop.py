"""Main loop of a helper process, which answers JSON requests of the process that started it (`program.py`).

Standard library only, and little of it, so that a program starts in some 20 ms and has its memory for itself.
"""

import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

LIFELINE = "PROGRAM_LIFELINE"
"""Environment variable with the file descriptor of a pipe, which closes when the client of a helper process is gone."""
AGAIN_S = 0.1
"""CPU seconds between repeated signals after a CPU limit, in case a library caught the error of the first signal."""

Answered = TypeVar("Answered")

# Surrogates are kept as they are; `\uXXXX` for every character that is not ASCII would be three times as long.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class TimeLimitError(BaseException):
    """Raised when a call has used up its CPU time. It is no `Exception`, since libraries catch those and continue."""


class RefusedError(Exception):
    """Raised in a helper process to refuse a request; the client gets the message without a class name."""


def within(cpu_s: float, work: Callable[..., Answered], *arguments: Any) -> Answered:
    """Call `work` and return its result; raise TimeLimitError after `cpu_s` seconds of CPU time.

    Only Python's own steps are interrupted, not a product of huge integers nor a wait: the asking process's deadline
    ends these. Not to be nested.
    """
    try:
        try:
            # Counts CPU time of this process, user and system, and sends SIGPROF.
            signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
            return work(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TimeLimitError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # where the signal came before the line above
        raise


def answer_questions(
    begin: Callable[[], Callable[[Any], Any]], *, memory_bytes: int | None = None, cpu_s: float | None = None
) -> None:
    """Answer requests (one JSON line each) from standard input until it ends or the client process is gone.

    begin: imports what is needed, and returns the function from a question to its answer, both JSON; its end, or error,
    is the first answer. memory_bytes: address space of this process from then on. cpu_s: CPU time for a question. An
    error, MemoryError and RecursionError as well, is answered with its class and its text; this process continues.
    Prints go to stderr.
    """
    end_with_asking_process()
    # From here on, only `answers` leads to the asking process.
    answers = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, _interrupt)
    function = None

    def begun(_: bytes) -> None:
        nonlocal function
        function = begin()

    def answered(line: bytes) -> Any:
        assert function
        return function(json.loads(line))

    _write(answers, _answer(begun, b"", None))
    if function is None:
        return
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin.buffer:
        _write(answers, _answer(answered, line, cpu_s))


def _answer(answered: Callable[[bytes], Any], line: bytes, cpu_s: float | None) -> bytes:
    """Return the response to a request, or the error that the request raised, as a JSON line."""

    def encoded() -> bytes:
        return _encoded({"answer": answered(line)})

    try:
        return encoded() if cpu_s is None else within(cpu_s, encoded)
    except TimeLimitError:
        return _encoded({"error": ["TimeLimitError", ""]})
    except RefusedError as error:
        return _encoded({"error": ["RefusedError", str(error)]})
    except Exception as error:
        return _encoded({"error": [type(error).__name__, _text_of(error)]})


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a class from outside may have any `__str__`
        return ""


def _encoded(content: dict[str, Any]) -> bytes:
    return _ENCODER.encode(content).encode("utf-8", "surrogatepass") + b"\n"


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


def _interrupt(*_: object) -> None:
    raise TimeLimitError


def end_with_asking_process(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this helper process and its process group a signal when the client process is gone.

    A parent-death signal would come when the *thread* that started this process ends, and a thread that waits here for
    the end of a pipe would not get its turn while a step of C holds the interpreter.
    """
    lifeline = int(os.environ.pop(LIFELINE))
    os.set_inheritable(lifeline, False)  # a program that this process becomes could take it all back
    # A negative owner is a process group. The signal takes the place of SIGIO, and O_ASYNC turns it on.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, number)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
