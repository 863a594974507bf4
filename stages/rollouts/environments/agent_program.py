"""Launcher of an agent program: `python -m stages.rollouts.environments.agent_program LIMITS WORD…`.

LIMITS is JSON: `memory_bytes` (address space of each process), `most_processes` (at a time, with their threads; more
fail with EAGAIN), `port` (of the gateway), `readable` (paths), `own_servers`. A child of this process confines itself,
and becomes the program. It writes to its home folder alone, and reads the installation of its command, the system's
files and the paths. Of the network it reaches one port, by TCP; with `own_servers` also the system's free ports, on one
of which it may listen. It sees no other process's environment, and from Linux 6.12 on signals none. Landlock's rule of
ports needs Linux 6.7: before, files and ports are as they were.

The kernel asks this process's child before the program, or what it has started, starts another process or a thread.
Whatever it starts is a descendant of both, even if its parents have ended: so all of it is counted, and ended, also
where either of the two is killed, as by a machine that runs out of memory.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from stages.core.process_tree import PR_SET_CHILD_SUBREAPER, descendants, die_with_parent, kill_until_gone
from stages.core.program_loop import end_with_asking_process
from stages.rewards import code_program

FILE_BYTES = 64 << 20
NUM_OPEN_FILES = 256
COUNT_INTERVAL_S = 0.1
"""Shortest time between two counts, which read all of /proc, once the program has as many as it may."""
READABLE = tuple(Path(path) for path in ("/bin", "/sbin", "/etc", "/proc", "/sys", "/opt", "/dev"))


def main(limits: str, *words: str) -> None:
    """Run the program, end all that it has started, and end as it did; exit with code 1 if there is no such program."""
    end_with_asking_process(signal.SIGTERM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # beside files that it may only read
    executable = shutil.which(words[0], path=environment["PATH"])
    if executable is None:
        sys.exit(f"there is no program {words[0]!r}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, _end_all)
    _adopt_orphans()
    if child := _forked(signal.SIGTERM):
        _, status = os.waitpid(child, 0)
    else:
        _adopt_orphans()
        status = _run(executable, words, environment, json.loads(limits))
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)  # without an end of the interpreter, which takes as long as the fork
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _forked(at_parent_s_end: int) -> int:
    """Fork this process, and return the child's pid; 0 in the child, which gets a signal when its parent ends."""
    parent = os.getpid()
    if child := os.fork():
        return child
    die_with_parent(at_parent_s_end)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
    return 0


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parents have ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _run(executable: str, words: tuple[str, ...], environment: dict[str, str], limits: dict[str, Any]) -> int:
    """Run the program in a child process, and return its exit status."""
    ours, theirs = socket.socketpair()
    if not (program := _forked(signal.SIGKILL)):
        _become(executable, words, environment, limits, theirs)
    theirs.close()
    return supervised(program, ours, limits["most_processes"])


def _end_all(*_: object) -> None:
    """End the program and all that it has started; further requests to do so are ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):  # without a child, nothing is below: a look at all of /proc is saved
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        kill_until_gone(lambda: descendants(os.getpid()))


def _become(
    executable: str, words: tuple[str, ...], environment: dict[str, str], limits: dict[str, Any], asking: socket.socket
) -> NoReturn:
    """Confine this process, and run the program in it. asking: gets the descriptor of `report_new_processes`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a virtual environment, and the installation that it is of
    installed = [path.parents[1] for path in (Path(executable), Path(executable).resolve()) if len(path.parents) > 2]
    readable = [*code_program.READABLE, *READABLE, *installed, *map(Path, limits["readable"])]
    writable = [Path(environment["HOME"]), *(Path("/dev") / name for name in ("null", "tty"))]
    for limit, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
    ):
        resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
        code_program.hide_other_processes()
    if code_program.landlock_version() >= code_program.NETWORK_VERSION:
        ports = code_program.ports_of_own_servers() if limits["own_servers"] else {}
        code_program.restrict_files(readable, writable, {**ports, limits["port"]: code_program.CONNECT})
    with contextlib.suppress(OSError):  # without libseccomp; Landlock has restricted TCP
        code_program.permit_tcp_only()
    if code_program.can_report_new_processes():
        socket.send_fds(asking, [b"."], [code_program.report_new_processes()])
    os.execve(executable, [words[0], *words[1:]], environment)  # noqa: S606 - the recipe's program


def supervised(program: int, asking: socket.socket, most_processes: int) -> int:
    """Wait for a program, and return its exit status. most_processes: of it and its descendants."""
    _, received, _, _ = socket.recv_fds(asking, 1, 1)
    poll = select.poll()
    for descriptor in (os.pidfd_open(program), *received):
        poll.register(descriptor, select.POLLIN)
    left, counted_s = 0, 0.0

    def is_allowed() -> bool:
        nonlocal left, counted_s
        if left <= 0 and time.monotonic() > counted_s + COUNT_INTERVAL_S:
            left, counted_s = most_processes - num_tasks(), time.monotonic()
        left -= 1
        return left >= 0

    while True:
        ready = [descriptor for descriptor, events in poll.poll() if events & select.POLLIN]
        for descriptor in received:
            if descriptor in ready:
                code_program.answer_new_process(descriptor, is_allowed)
        with contextlib.suppress(ChildProcessError):
            # processes without parents have become children of this one
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    return ended[1]


def num_tasks() -> int:
    """Return the number of descendants of this process and their threads; also those ended that none has waited for."""
    processes: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                processes[int(folder.name)] = int(fields[1]), int(fields[17])  # the parent, and the number of threads
    below: set[int] = {os.getpid()}
    while more := {pid for pid, (parent, _) in processes.items() if parent in below} - below:
        below |= more
    return sum(max(1, processes[pid][1]) for pid in below - {os.getpid()})


if __name__ == "__main__":
    main(*sys.argv[1:])
