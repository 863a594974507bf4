"""Process that outlives the tests, however they end, and kills the servers, daemons and jobs that they left running.

Fixtures do not come to their ends when pytest is killed, nor in workers of pytest-xdist when it is interrupted: servers
in sessions of their own would stay.

    python sweeper.py MARK     reads standard input to its end, which comes with that of pytest
"""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from stages.core.process_tree import end_processes, marked_processes

MARK_VARIABLE = "TESTS_OF_LLM_LIFECYCLE"
_sweepers = []


def pytest_configure(config) -> None:
    """Start the sweeper, whose mark workers of pytest-xdist inherit from the main process."""
    if hasattr(config, "workerinput"):
        return
    os.environ[MARK_VARIABLE] = mark = uuid.uuid4().hex
    # A session of its own, so that Ctrl-C does not reach it; the pipe is closed by the kernel when pytest is killed.
    sweeper = [sys.executable, __file__, f"{MARK_VARIABLE}={mark}"]
    _sweepers.append(subprocess.Popen(sweeper, stdin=subprocess.PIPE, start_new_session=True))


def pytest_unconfigure() -> None:
    """Wait until the sweeper has killed all processes that the tests left running."""
    for sweeper in _sweepers:
        sweeper.communicate()
    _sweepers.clear()


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):  # it has ended since
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            print(f"ended what the tests had left: {pid} {command}", file=sys.stderr, flush=True)
    end_processes(lambda: marked_processes(mark))


if __name__ == "__main__":
    main(sys.argv[1])
