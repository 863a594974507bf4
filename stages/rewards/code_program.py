"""Runs code that a model wrote, and tests of it, within limits: `python -m stages.rewards.code_program LIMITS`.

LIMITS is JSON: `cpu_s`, `memory_bytes`, `file_bytes`. On the standard input comes JSON: `code`, `tests` (texts), and
`word`, which is written to what was the standard output when all tests have passed: code that ends the process early
has not passed. Where the limits cannot be set, what is missing is written instead, and nothing is run.

This process is all that the code has: it starts no other process and no thread, opens no connection, and writes to the
folder that it begins in alone. It reads Python and the system's libraries, and no other process's environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

from stages.rewards import landlock, system_calls

PR_SET_PDEATHSIG = 1
NUM_OPEN_FILES = 32
READABLE = (
    *(Path(path) for path in (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")),
    *(Path("/etc") / name for name in ("ld.so.cache", "localtime")),
    *(Path("/dev") / name for name in ("zero", "random", "urandom")),
)


def main(limits: str) -> None:
    """Answers once."""
    asked = json.load(sys.stdin)
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    try:
        _confine(**json.loads(limits))
    except (OSError, ValueError) as error:  # ValueError: a limit above the one that is set already
        os.write(answers, f"{type(error).__name__}: {error}".encode())
        return
    if _passes(asked["code"], asked["tests"]):
        os.write(answers, asked["word"].encode())
    os._exit(0)  # what the code left for the end is not run


def _confine(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    landlock.restrict_files(readable=READABLE, writable=[Path.cwd(), Path(os.devnull)])
    system_calls.permit_computing_only()


def _passes(code: str, tests: list[str]) -> bool:
    names = {"__name__": "__main__"}
    try:
        for text in (code, *tests):
            exec(compile(text, "<completion>", "exec"), names)  # noqa: S102 - this process is for nothing else
    except BaseException:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
