"""Processes (ranks) of a test program, forked from one parent that has imported the program, to save import time.

    python -m tests.parity.ranks

A program is a module whose `main()` finds its arguments in `sys.argv`. The parent reads requests, a line of JSON each,
`[program, number of processes, log file, arguments]`, and answers with an exit code: 0, or that of the first rank that
failed, which takes the others along.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from stages.core.process_tree import descendants, die_with_parent
from tests.slurm_cluster import free_ports

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1100.0
TIMED_OUT = 124


class Ranks:
    """Parent process from which the ranks of test programs are forked, so that imports are made once."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent
        self._unanswered = 0

    @property
    def pid(self) -> int:
        """Process id of the parent from which ranks are forked."""
        return self._parent.pid

    def processes(self) -> list[int]:
        """Return the process ids of the living ranks."""
        return descendants(self.pid)

    def run(self, program: str, processes: int, *arguments: object, log: Path) -> None:
        """Run a test program's `main()` in so many ranks; raise RuntimeError with their output's end if one fails."""
        code = self.start(program, processes, *arguments, log=log)()
        if code != 0:
            answer = "its parent died" if code is None else code
            raise RuntimeError(f"{program}: {answer}: {log.read_text()[-6000:]}")

    def start(self, program: str, processes: int, *arguments: object, log: Path) -> Callable[[], int | None]:
        """Start a test program's ranks; return a function that waits for their exit code (None: their parent died)."""
        assert self._parent.stdin
        while self._unanswered:  # requests of tests that failed before they waited
            self._answer()
        print(json.dumps([program, processes, str(log), [str(one) for one in arguments]]), file=self._parent.stdin)
        self._parent.stdin.flush()
        self._unanswered += 1
        return self._answer

    def _answer(self) -> int | None:
        assert self._parent.stdout
        self._unanswered -= 1
        answer = self._parent.stdout.readline()
        return int(answer) if answer else None


@contextmanager
def started_ranks(**more_environment: str) -> Iterator[Ranks]:
    """Start a parent process from which ranks are forked; it imports each test program at the first request."""
    # Packages and libraries may lie where only these say, as on a machine that `make gpu-kit` was carried to.
    inherited = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    packages = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    environment = {**inherited, "PATH": "/usr/bin:/bin", "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.parity.ranks"],
        cwd=ROOT,
        env={**environment, "MASTER_ADDR": "127.0.0.1", **more_environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    with parent:
        try:
            yield Ranks(parent)
        finally:
            parent.kill()


def answer_requests(requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        program, processes, log, arguments = json.loads(line)
        with Path(log).open("ab") as output:
            main = _load(program, output.fileno())
            code = _run(main, processes, [program, *arguments], output.fileno()) if main else 1
        print(code, file=answers, flush=True)


def _load(program: str, output: int) -> Callable[[], None] | None:
    """Import a program and return its `main`; None if the import fails, whose traceback goes to the log."""
    os.dup2(output, 2)
    try:
        main: Callable[[], None] = importlib.import_module(program).main
    except Exception:
        traceback.print_exc()
        return None
    gc.freeze()  # the ranks need not look through it for garbage
    return main


def _run(main: Callable[[], None], processes: int, arguments: list[str], output: int) -> int:
    group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": str(free_ports(1)[0])}
    ranks = {
        _fork(main, arguments, {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}, output)
        for rank in range(processes)
    }
    code, end_s = 0, time.monotonic() + TIMEOUT_S
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        ranks.discard(pid)
        failed_now = os.waitstatus_to_exitcode(status) if pid else 0
        if time.monotonic() > end_s:
            failed_now = TIMED_OUT
        if failed_now and not code:
            code = failed_now
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0 if pid else 0.02)
    return code


def _fork(main: Callable[[], None], arguments: list[str], environment: dict[str, str], output: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ |= environment
        run_in_fork(main, arguments, output)
    return pid


def run_in_fork(main: Callable[[], None], arguments: list[str], output: int) -> NoReturn:
    """Run a program's `main()` in this fork, and end as Python ends a script. output: descriptor for its output."""
    code = 1
    try:
        die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = arguments
        main()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    answer_requests(sys.stdin, answers)
