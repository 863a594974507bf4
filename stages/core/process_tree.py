"""Program that runs a command and ends all its descendant processes, and functions that find and end processes.

    python -I -S process_tree.py LIFELINE GRACE_S COMMAND ARGUMENT…

The program dies with the process that started it, and takes every descendant of the command along. LIFELINE is the read
end of a pipe whose write end only the starting process holds, so its end means that this process is gone. (A
parent-death signal alone would fire when the starting *thread* ends, and Prefect runs tasks in threads.) Descendants
are found by walking /proc: some programs start their workers in sessions of their own, where no process group reaches
them. Exits with the command's code, or 128 + the signal that killed it. `supervised.py` is the starting side. Standard
library only (psutil is out of reach without site-packages); starts in 30 ms.
"""

import contextlib
import ctypes
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TOKEN_VARIABLE = "LIFECYCLE_STAGE_TOKEN"  # noqa: S105 (marks processes, no secret)
PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (where POSIX shared memory lies)
SAMPLE_INTERVALS_S = (0.5, 5.0)
"""Shortest and longest interval in seconds between looks at the shared memory, which is mostly mapped early."""
SAMPLES_PER_AGE = 20
CLEANING_S = 2.0
EXEC_LOOKS, EXEC_LOOK_S = 50, 0.001


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


# ------------------------------------------------------------------------------------------------- what /proc knows


def living_processes() -> dict[int, tuple[int, int]]:
    """Return the parent's pid and the session id of every process that is not a zombie, by pid."""
    processes = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            # After the name in parentheses, which may hold spaces and parentheses itself: state, ppid, pgrp, session.
            state, parent, _, session = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                processes[pid] = (int(parent), int(session))
    return processes


def working_directories() -> set[Path]:
    """Return the working directories of all processes that this user may inspect, to see which folders are in use."""
    found = set()
    for pid in living_processes():
        with contextlib.suppress(OSError):
            found.add((PROC / str(pid) / "cwd").readlink())
    return found


def started_ticks(pid: int) -> int | None:
    """Return a process's start time in kernel clock ticks, to tell reused pids apart; None if it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # `starttime` is field 22 of proc(5), and the 20th after the name.
    return None if fields[0] in "ZX" else int(fields[19])


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of a process: children, their children, and so on."""
    return _descendants_of([pid], living_processes())


def marked_processes(token: str, session: int | None = None) -> list[int]:
    """Return pids of the processes with `token` in their environment or in a session, and of all their descendants."""
    living = living_processes()
    roots = [pid for pid, (_, its_session) in living.items() if its_session == session or _has_token(pid, token)]
    return sorted({*roots, *_descendants_of(roots, living)} - {os.getpid()})


def kill_until_gone(find: Callable[[], list[int]], patience_s: float = 10.0) -> None:
    """Kill the processes that `find` returns until it returns none, since a dying process may still fork others."""
    deadline_s = time.monotonic() + patience_s
    while (pids := find()) and time.monotonic() < deadline_s:
        send(signal.SIGKILL, pids)
        time.sleep(0.02)


def end_processes(find: Callable[[], list[int]], shared_memory: Iterable[Path] = ()) -> None:
    """Kill the processes that `find` returns, and remove the shared-memory files (/dev/shm) that they leave behind.

    Python's resource trackers are killed last: a tracker removes the shared memory of ended processes, which it knows
    better than a look from outside, and then ends by itself. shared_memory: files known from earlier looks.
    """
    files = {*shared_memory, *shared_memory_of(pids := find())}
    if pids:  # each further look reads all of /proc
        kill_until_gone(lambda: [pid for pid in find() if not _cleans_up(pid)])
        wait_for_end(find, CLEANING_S)  # only resource trackers are left
        kill_until_gone(find)
    remove_shared_memory(files)


def wait_for_end(find: Callable[[], list[int]], patience_s: float) -> None:
    """Wait until `find` returns no processes, or `patience_s` seconds have passed."""
    deadline_s = time.monotonic() + patience_s
    while find() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to processes; those that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the shared-memory files in /dev/shm that these processes have mapped.

    By inode, as glibc maps a new semaphore under a passing name; and not of a container's, with the same numbers.
    """
    if not Path(SHARED_MEMORY).exists():
        return set()
    device = Path(SHARED_MEMORY).stat().st_dev
    # A line of `maps`: address, permissions, offset, device, inode, path.
    device_in_maps = f"{os.major(device):02x}:{os.minor(device):02x}"
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text().splitlines():
                if SHARED_MEMORY in line and device_in_maps in (fields := line.split(maxsplit=5)):
                    inodes.add(int(fields[4]))
    return {Path(file.path) for file in os.scandir(SHARED_MEMORY) if file.inode() in inodes} if inodes else set()


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove shared-memory files of ended processes from /dev/shm, except those that a living process uses."""
    existing = {file for file in files if file.exists()}
    for file in existing - shared_memory_of(_pids() if existing else ()):
        with contextlib.suppress(OSError):
            file.unlink()


def _pids() -> list[int]:
    return [int(process.name) for process in PROC.iterdir() if process.name.isdigit()]


def _descendants_of(roots: Iterable[int], living: dict[int, tuple[int, int]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in living.items():
        children.setdefault(parent, []).append(pid)
    descendants: list[int] = []
    todo = [*roots]
    while todo:
        below = children.get(todo.pop(), [])
        descendants += below
        todo += below
    return descendants


def _has_token(pid: int, token: str) -> bool:
    folder = PROC / str(pid)
    try:
        environment = (folder / "environ").read_bytes()
        for _ in range(EXEC_LOOKS):
            # In the middle of an exec a process shows neither environment nor command line. A kernel thread, which
            # never shows them, has no program, which is an OSError here.
            if environment or (folder / "cmdline").read_bytes() or not (folder / "exe").readlink():
                break
            time.sleep(EXEC_LOOK_S)
            environment = (folder / "environ").read_bytes()
        return token.encode() in environment
    except OSError:
        return False


def _cleans_up(pid: int) -> bool:
    """Return whether a process is Python's resource tracker, which frees the shared memory of ended processes."""
    try:
        return b"multiprocessing.resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- the program


class Supervisor:
    """Supervisor of a command, which ends all its processes when it exits, is stopped, or its starter dies."""

    def __init__(self, lifeline: int, grace_s: float, command: list[str]):
        self.lifeline = lifeline
        self.grace_s = grace_s
        self.status: int | None = None
        self.stop_requested = False
        self.shared_memory: set[Path] = set()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us, not to init
        # Before the command starts: one that ends at once must wake `_wait`, too.
        self.wakeup = self._listen()
        self.child = self._start(command)

    def run(self) -> int:
        """Wait for the command to end, end all its descendants, and return the exit code."""
        began_s = time.monotonic()
        shortest_s, longest_s = SAMPLE_INTERVALS_S
        while self.status is None and not self.stop_requested:
            # Every 0.5 s in the first 10 s, then a twentieth of the age, every 5 s from 100 s on.
            self._wait(min(longest_s, max(shortest_s, (time.monotonic() - began_s) / SAMPLES_PER_AGE)))
            self.shared_memory |= shared_memory_of(descendants(os.getpid()))
        self._end_descendants()
        return 128 + signal.SIGTERM if self.status is None else self.status

    def _listen(self) -> int:
        """Install signal handlers that remember requests to end and wake `_wait` through a pipe."""
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writable)
        # Without a handler, even an empty one, Python would write nothing to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        return readable

    def _stop(self, *_: object) -> None:
        self.stop_requested = True

    def _start(self, command: list[str]) -> int:
        supervisor = os.getpid()
        child = os.fork()
        if child:
            return child
        # The pipe is the supervisor's: no signal to the child may write to it.
        signal.set_wakeup_fd(-1)
        die_with_parent()
        # The supervisor ended before the kernel was asked, so no signal will come.
        if os.getppid() != supervisor:
            os._exit(128 + signal.SIGTERM)
        try:
            os.execvp(command[0], command)  # noqa: S606 (a shell is what must not be here)
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    def _wait(self, timeout_s: float) -> None:
        """Wait for a signal, the end of the process that started this one, or the timeout; reap ended children."""
        readable, _, _ = select.select([self.lifeline, self.wakeup], [], [], timeout_s)
        if self.wakeup in readable:
            os.read(self.wakeup, 4096)
        if self.lifeline in readable:
            self.stop_requested = True
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            # Adopted orphans are reaped as well, but only the command's end counts.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid == self.child:
                    code = os.waitstatus_to_exitcode(status)
                    self.status = code if code >= 0 else 128 - code  # -9 -> 137, as in a shell

    def _end_descendants(self) -> None:
        """End all descendant processes with SIGTERM, and with SIGKILL after a grace period."""
        left = functools.partial(descendants, os.getpid())
        self.shared_memory |= shared_memory_of(left())  # before they end: an ended process maps nothing
        send(signal.SIGTERM, left())
        wait_for_end(left, self.grace_s)
        end_processes(left, self.shared_memory)
        self._reap()


if __name__ == "__main__":
    sys.exit(Supervisor(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).run())
