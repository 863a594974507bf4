"""Commands that a supervisor restarts, their logs, and the hand-over to the next supervisor. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from stages.core.lines import print_line
from stages.core.process_tree import TOKEN_VARIABLE, die_with_parent, marked_processes, started_ticks

LOG_BYTES, NUM_LOGS = 10 * 2**20, 5
"""Size in bytes from which a log is rotated, and the number of log files kept."""
DESCRIPTOR = "{descriptor}"
"""Placeholder in a command line for the descriptor number of the inherited listening socket."""
START_TIMEOUT_S = 300.0
SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def now() -> str:
    """Return the local date and time with its time zone, for log lines."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def open_log(path: Path) -> BinaryIO:
    """Open a log file for appending, after rotating it if it is too long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate(path)
    return path.open("ab")


def rotate(path: Path) -> None:
    """Rotate a log file of more than 10 MiB: it is moved to `.1`, `.1` to `.2` and so on, and the fifth is deleted.

    It is copied and cut, since a program may be appending to it. Lines written between the two are lost.
    """
    with contextlib.suppress(OSError):  # a full disk, say: the log stays, and so does the program
        if path.stat().st_size <= LOG_BYTES:
            return
        former = [path.with_name(f"{path.name}.{number}") for number in range(1, NUM_LOGS)]
        for older, old in reversed(list(zip(former[1:], former[:-1], strict=True))):
            if old.exists():
                old.replace(older)
        try:
            # A copy that is cut off by a full disk is removed, and the log stays whole.
            shutil.copyfile(path, former[0])
        except OSError:
            former[0].unlink(missing_ok=True)
            raise
        os.truncate(path, 0)


def say(text: str) -> None:
    """Write a line with the time to the supervisor's log; errors, such as a full disk, are ignored."""
    with contextlib.suppress(OSError):
        print_line(f"{now()} {text}")


@dataclass
class SupervisedCommand:
    """Command that a supervisor keeps running: its process, listening socket, health check and log.

    command: `{descriptor}` in it becomes the descriptor number of the socket, which listens already.
    environment: the whole environment, with a token of its own as TOKEN_VARIABLE.
    folder: where the command runs; empty: where the supervisor does.
    port: where it is asked for `health_path`: any HTTP answer below 500 counts as alive.
    needs: name of another command. While that is not kept here, or does not answer, 500 and above count as alive, too:
    the worker says 503 while Prefect is away.
    hung_after_s: seconds without an answer, in six requests, after which one that has answered once is killed.
    start_timeout_s: seconds until its first answer.
    log: file for stdout and stderr, which is rotated; empty: those of the supervisor.
    spares_children: whether processes that the command started go on after its death.
    dies_with_us: whether the kernel kills the command when the supervisor dies.
    descriptor: its listening socket in this process, if any yet.
    pid, started_ticks: its living process, as `/proc` shows it; None: it is to be started.
    deaths: how often it died in a row.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    health_path: str
    folder: str = ""
    needs: str = ""
    hung_after_s: float = 60.0
    start_timeout_s: float = START_TIMEOUT_S
    log: str = ""
    host: str = "127.0.0.1"
    spares_children: bool = False
    dies_with_us: bool = False
    descriptor: int | None = None
    pid: int | None = None
    started_ticks: int | None = None
    deaths: int = 0

    def start(self) -> None:
        """Start a process of the supervised command, which inherits the command's listening socket. Raises OSError."""
        if self.descriptor is None:
            # Once for all its processes: a restarted one inherits the same socket, with the clients that wait in it.
            self.descriptor = socket.create_server((self.host, self.port), backlog=2048).detach()
        with self._output() as output:
            process = subprocess.Popen(
                [part.replace(DESCRIPTOR, str(self.descriptor)) for part in self.command],
                pass_fds=(self.descriptor,),
                env={name: value for name, value in self.environment.items() if name not in SYSTEMD_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if self.log else None,
                cwd=self.folder or None,
                start_new_session=True,
                # The kernel's signal comes when the starting thread ends; the supervisor has but one.
                preexec_fn=die_with_parent if self.dies_with_us else None,
            )
        process.returncode = 0  # it is waited for by number, so Popen must not wait
        self.pid, self.started_ticks = process.pid, started_ticks(process.pid)

    def alive(self) -> bool:
        ticks = started_ticks(self.pid) if self.pid else None
        return ticks is not None and ticks == self.started_ticks

    def kill(self) -> None:
        if self.pid and self.alive():
            os.kill(self.pid, signal.SIGKILL)

    def relatives(self) -> list[int]:
        """Return the processes that must end before the command is restarted, without children that outlive it."""
        marked = marked_processes(self.environment[TOKEN_VARIABLE])
        return [pid for pid in marked if not self.spares_children or self._runs(pid)]

    def _runs(self, pid: int) -> bool:
        """Return whether the process with this id runs this supervised command, judged by its command line."""
        fixed = [part for part in self.command if DESCRIPTOR not in part]
        with contextlib.suppress(OSError):
            # Without the descriptor, whose number may differ from start to start.
            return set(fixed) <= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        return False

    @contextlib.contextmanager
    def _output(self) -> Iterator[int]:
        if not self.log:
            # In the foreground the command shares the supervisor's output.
            yield sys.stdout.fileno()
            return
        with open_log(Path(self.log)) as log:
            log.write(f"--- {now()} {self.name} starts\n".encode())
            log.flush()
            yield log.fileno()


@dataclass
class HandOver:
    """Commands that a supervisor keeps running, with their sockets and the supervisor's lock.

    home: of the servers that it keeps; empty: it keeps a command in the foreground, as `keep` says. lock: descriptor.
    """

    kept: list[SupervisedCommand] = field(default_factory=list)
    home: str = ""
    lock: int | None = None

    def descriptors(self) -> list[int]:
        """Return the file descriptors (lock and sockets) that the next supervisor process must inherit."""
        sockets = [one.descriptor for one in self.kept]
        return [descriptor for descriptor in (self.lock, *sockets) if descriptor is not None]

    def release(self) -> None:
        """Release the supervisor's lock, so that another process can take it."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def in_memory(self) -> int:
        """Write the commands to an anonymous file in memory, for the next supervisor; return the file's descriptor."""
        descriptor = os.memfd_create("plan")
        with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
            # Descriptors are written as numbers: valid after an exec, and replaced by `lock.py` after a hand-over.
            json.dump(asdict(self), stream)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> HandOver:
        """Read the supervised commands that the previous supervisor wrote into memory, and close the descriptor."""
        with open(descriptor, encoding="utf-8") as stream:
            # The writer shares the file's position, which is at its end.
            stream.seek(0)
            content = json.load(stream)
        return cls(**{**content, "kept": [SupervisedCommand(**one) for one in content["kept"]]})
