"""Keeps commands alive: the local servers and the worker of a home, or the proxy of a served champion.

    python -m flows.servers.supervisor DESCRIPTOR

DESCRIPTOR is a file in memory that holds a `Plan` as JSON: environments hold secrets, which must lie on no disk. The
supervisor imports the standard library alone, since it stays for as long as the machine runs.

It holds the listening socket of each command (`Kept`). When a command dies, clients wait in the socket's queue until
its successor answers, instead of being refused. A command that lives, but does not answer, is killed.

The supervisor of a home holds a lock (`Lock`) that the kernel releases when it dies; `lifecycle up` and `down` ask it
to hand over what it keeps, and to end. `keep` turns a process into the supervisor of one command.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NoReturn

from stages.core.supervisor import (
    TOKEN_VARIABLE,
    die_with_parent,
    end_processes,
    marked_processes,
    send,
    started_ticks,
)

DESCRIPTOR = "{descriptor}"
"""In a command, stands for the number of the descriptor of the listening socket."""
LOOK_EVERY_S = 1.0
MAX_FAILURES = 6
"""Questions in a row without a good answer. Seconds alone would kill what is well after the supervisor was held up."""
ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 0.2
START_TIMEOUT_S = 300.0
LIVED_S = 60.0
"""A command that has lived so long, and answered, has not died again and again."""
LONGEST_PAUSE_S = 60.0
HAND_OVER_TIMEOUT_S = 5.0
LOG_BYTES, NUM_LOGS = 10 * 2**20, 5
SYSTEMD_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass
class Kept:
    """A command that is kept alive, with its listening socket.

    command: `{descriptor}` in it becomes the number of the inherited descriptor of the socket, which listens already.
    environment: the whole environment, with a token of its own as TOKEN_VARIABLE.
    folder: where the command runs; empty: where the supervisor does.
    port: where it is asked for `health_path`: any HTTP answer below 500 counts as alive.
    needs: name of another command. While that does not answer, or is not kept here, an answer of 500 and above counts
        as alive, too: the worker says 503 while Prefect is away.
    hung_after_s: seconds without an answer after which a command that has answered once is killed; it is asked six
        times in them.
    start_timeout_s: seconds until its first answer.
    log: file for stdout and stderr, which grows and is rotated; empty: those of the supervisor.
    spares_children: whether processes that the command started outlive its death and go on.
    dies_with_us: whether the kernel kills the command when the supervisor dies.
    descriptor: its listening socket in this process; None: none yet.
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
        """Start it. Raises OSError."""
        if self.descriptor is None:
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
                preexec_fn=die_with_parent if self.dies_with_us else None,
            )
        process.returncode = 0  # it is waited for by number, whoever started it
        self.pid, self.started_ticks = process.pid, started_ticks(process.pid)

    def alive(self) -> bool:
        """Whether its process runs."""
        ticks = started_ticks(self.pid) if self.pid else None
        return ticks is not None and ticks == self.started_ticks

    def kill(self) -> None:
        """SIGKILL to its process, if it runs."""
        if self.pid and self.alive():
            os.kill(self.pid, signal.SIGKILL)

    def relatives(self) -> list[int]:
        """Processes left by it that must end before it starts again: of one that spares its children, itself alone."""
        marked = marked_processes(self.environment[TOKEN_VARIABLE])
        return [pid for pid in marked if not self.spares_children or self._runs(pid)]

    def _runs(self, pid: int) -> bool:
        """Whether a process runs this command: the worker that a dead supervisor started last is on no record."""
        fixed = [part for part in self.command if DESCRIPTOR not in part]
        with contextlib.suppress(OSError):
            return set(fixed) <= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        return False

    @contextlib.contextmanager
    def _output(self) -> Iterator[int]:
        if not self.log:
            yield sys.stdout.fileno()
            return
        with open_log(Path(self.log)) as log:
            log.write(f"--- {_now()} {self.name} starts\n".encode())
            log.flush()
            yield log.fileno()


@dataclass
class Plan:
    """All that a supervisor keeps.

    home: of the servers that it keeps; empty: it keeps a command in the foreground, as `keep` says.
    lock: the descriptor of the home's lock.
    """

    kept: list[Kept] = field(default_factory=list)
    home: str = ""
    lock: int | None = None

    def descriptors(self) -> list[int]:
        """What a process needs to go on with it."""
        sockets = [one.descriptor for one in self.kept]
        return [descriptor for descriptor in (self.lock, *sockets) if descriptor is not None]

    def release(self) -> None:
        """Close the lock, and with it all that it kept from others."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def in_memory(self) -> int:
        """A descriptor from which it can be read, and which no other program sees."""
        descriptor = os.memfd_create("plan")
        with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
            json.dump(asdict(self), stream)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> Plan:
        """What `in_memory` has written; the descriptor is closed."""
        with open(descriptor, encoding="utf-8") as stream:
            stream.seek(0)
            content = json.load(stream)
        return cls(**{**content, "kept": [Kept(**one) for one in content["kept"]]})


def keep(kept: Kept, public: socket.socket) -> NoReturn:
    """Become the supervisor of one command, in this process and its terminal; it listens on `public`.

    The command ends when this process does, however that ends. After SIGTERM and SIGINT it gets a SIGTERM, and all the
    time that it wants to end; the exit code is its own. So it is when the command ends before it has ever answered.
    Otherwise, what dies or does not answer is started again, with the same socket and environment. To systemd it says
    that it is ready (`Type=notify`) with the first answer, and that it lives (`WatchdogSec=`).
    """
    kept.descriptor, kept.dies_with_us = public.detach(), True
    become(Plan([kept]))


def become(plan: Plan) -> NoReturn:
    """Become the supervisor, in the same process."""
    sys.stdout.flush()
    plan_descriptor = plan.in_memory()
    for descriptor in (*plan.descriptors(), plan_descriptor):
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [*_COMMAND, str(plan_descriptor)])  # noqa: S606 (no shell)


def start(plan: Plan) -> None:
    """Start the supervisor of a home beside this process, whose end it does not notice."""
    folder = _folder(plan.home)
    plan_descriptor = plan.in_memory()
    hidden = (*SYSTEMD_VARIABLES, TOKEN_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with open_log(folder / "server.log") as log:
        subprocess.run(
            [*_COMMAND, str(plan_descriptor), "--detach"],
            pass_fds=(*plan.descriptors(), plan_descriptor),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            check=True,
        )
    for descriptor in (*plan.descriptors(), plan_descriptor):
        os.close(descriptor)


_COMMAND = [sys.executable, "-m", "flows.servers.supervisor"]


# ---------------------------------------------------------------------------------------- one supervisor of a home


def _folder(home: str | Path) -> Path:
    """Where the lock and the log of a home's supervisor are."""
    return Path(home) / "supervisor"


class Lock:
    """The lock of a home's supervisor. In it is where the one that holds it is found."""

    def __init__(self, home: Path):
        self.path = _folder(home) / "lock"

    def holder(self) -> int | None:
        """Process id of the supervisor that runs, on this machine; None when none does."""
        try:
            with self.path.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            found = self._holder()
            return found.pid if found else None
        return None

    def take(self) -> Plan | None:
        """The lock, and what the supervisor kept that held it, if one did: it ends. One that hangs is killed.

        None when it is held elsewhere: on another machine, or in another container.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._acquire(descriptor, 0.0):
            return Plan(lock=descriptor)
        handed = Plan()
        if holder := self._holder():
            try:
                handed = _ask_to_hand_over(holder.address)
            except OSError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(holder.pid, signal.SIGKILL)
        if self._acquire(descriptor, HAND_OVER_TIMEOUT_S):
            handed.lock = descriptor
            return handed
        os.close(descriptor)
        return None

    def _acquire(self, descriptor: int, patience_s: float) -> bool:
        end_s = time.monotonic() + patience_s + 0.2  # a look by `holder` takes it for a moment
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)  # in a copied home, the supervisor of the original is named there
                return True
            if time.monotonic() > end_s:
                return False
            time.sleep(0.02)

    def _holder(self) -> _Holder | None:
        """Who holds it, if that is a process of ours to see."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            holder = _Holder(**json.loads(self.path.read_text()))
            command = Path(f"/proc/{holder.pid}/cmdline").read_bytes()
            if holder.machine == _machine() and b"flows.servers.supervisor" in command:
                return holder
        return None


@dataclass
class _Holder:
    """Content of the lock's file: where a supervisor is found. address: of its socket, abstract, in hex."""

    pid: int
    address: str
    machine: str

    def note(self, lock: int) -> None:
        """Write it to the file of a lock that is held."""
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(asdict(self)).encode(), 0)


def _machine() -> str:
    """Tells machines apart that share a home, and containers, each with processes of its own."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _ask_to_hand_over(address: str) -> Plan:
    """The plan of a supervisor, with its sockets, after which it ends. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        connection.connect(bytes.fromhex(address))
        if not _is_ours(connection):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "a process of another user")
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 64)
    if not descriptors:
        raise ConnectionResetError(errno.ECONNRESET, "handed nothing over")
    plan = Plan.read(descriptors[0])
    sockets = iter(descriptors[1:])
    for one in plan.kept:
        if one.descriptor is not None:
            one.descriptor = next(sockets)
    plan.lock = None
    return plan


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


# ------------------------------------------------------------------------------------------------------------- logs


def open_log(path: Path) -> BinaryIO:
    """A log to append to, which was rotated if it was long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate(path)
    return path.open("ab")


def rotate(path: Path) -> None:
    """Move a log of more than 10 MiB to `.1`, `.1` to `.2` and so on; the fifth is dropped.

    It is copied and cut, since a program may be writing to it: it appends, and goes on at the new end. Lines that it
    writes between the two are lost.
    """
    with contextlib.suppress(OSError):  # a full disk, say: the log stays, and so does the program
        if path.stat().st_size <= LOG_BYTES:
            return
        former = [path.with_name(f"{path.name}.{number}") for number in range(1, NUM_LOGS)]
        for older, old in reversed(list(zip(former[1:], former[:-1], strict=True))):
            if old.exists():
                old.replace(older)
        try:
            shutil.copyfile(path, former[0])
        except OSError:
            former[0].unlink(missing_ok=True)
            raise
        os.truncate(path, 0)


# ---------------------------------------------------------------------------------------------------------- systemd


def notify(state: str) -> None:
    """Say something to systemd, where it started this process as a service of `Type=notify`."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(0.2)  # its queue is full, should systemd be held up
            connection.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)


# ------------------------------------------------------------------------------------------------------ the program
class Supervisor:
    """Keeps what a plan says, until it is stopped or hands over."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._home_inode = _inode(plan.home)
        self.selector = selectors.DefaultSelector()
        self.running = [_Running(one, self) for one in plan.kept]
        self.num_stop_requests = 0
        self.handed_over = False
        self.is_ready = False
        self._listen_to_signals()
        if plan.lock is not None:
            self._listen_to_successor(plan.lock)

    def run(self) -> int:
        """Returns the exit code to end with."""
        while not self.num_stop_requests:
            for one in self.running:
                one.look()
            if not self.is_ready and all(one.has_answered for one in self.running):
                self.is_ready = True
                notify("READY=1")
            if self.plan.home:
                rotate(_folder(self.plan.home) / "server.log")
            elif failed := [one.exit_code for one in self.running if one.kept.deaths and not one.has_ever_answered]:
                return _shell_code(failed[0])
            self._wait(min([LOOK_EVERY_S, *(one.pause_s() for one in self.running)]))
            if self.handed_over:
                return 0
        notify("STOPPING=1")
        return self._stop_home() if self.plan.home else self._stop_commands()

    def finds_home(self) -> bool:
        """Whether the home is where it was; it may have been moved, and another one, such as its copy, be there now."""
        return _inode(self.plan.home) == self._home_inode

    def answers(self, name: str) -> bool:
        """Whether a command of this name is kept here, and answered when it was asked last."""
        return any(one.answers for one in self.running if one.kept.name == name)

    def record(self, kept: Kept) -> None:
        """Have the home's records say which process it is, and how often it died in a row."""
        if self.plan.home and self.finds_home():
            arguments = [kept.name, str(kept.pid or 0), str(kept.deaths)]
            # In a process of its own: records are read and written by a library of 15 MB.
            done = subprocess.run([sys.executable, "-m", "flows.servers.records", *arguments], env=self._environment())
            if done.returncode:
                say(f"{kept.name}: its record could not be written")

    def _environment(self) -> dict[str, str]:
        hidden = (*SYSTEMD_VARIABLES, TOKEN_VARIABLE)
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        return {**inherited, "LIFECYCLE_HOME": self.plan.home}

    def _wait(self, timeout_s: float) -> None:
        """Sleep until there is something to do. systemd is told each time that we live."""
        for key, _ in self.selector.select(timeout_s):
            key.data()
        if "WATCHDOG_USEC" in os.environ:
            notify("WATCHDOG=1")

    def _listen_to_signals(self) -> None:
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writable)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_stop)
        self.selector.register(readable, selectors.EVENT_READ, lambda: os.read(readable, 4096))

    def _request_stop(self, *_: object) -> None:
        self.num_stop_requests += 1

    def _listen_to_successor(self, lock: int) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("")  # the kernel picks an abstract address: no file that would be left
        listener.listen()
        _Holder(os.getpid(), listener.getsockname().hex(), _machine()).note(lock)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._hand_over(listener))

    def _hand_over(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            if not _is_ours(connection):
                return
            sockets = [one.descriptor for one in self.plan.kept if one.descriptor is not None]
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [b"!"], [self.plan.in_memory(), *sockets])
                self.handed_over = True
                self.selector.unregister(listener)
                if self.num_stop_requests:  # else our end, which is near, releases the lock
                    self.plan.release()

    def _stop_home(self) -> int:
        """What `lifecycle down` does; it asks us to hand over first."""
        command = [sys.executable, "-c", "from flows.cli.main import main; main(['down'])"]
        stopping = subprocess.Popen(command, env=self._environment())
        while stopping.poll() is None:
            self._wait(0.1)
        return stopping.returncode

    def _stop_commands(self) -> int:
        living = [one for one in self.running if one.is_alive()]
        send(signal.SIGTERM, [one.kept.pid for one in living if one.kept.pid])
        while any(one.is_alive() for one in living) and self.num_stop_requests == 1:
            self._wait(LOOK_EVERY_S)
        for one in living:
            end_processes(one.kept.relatives)
            one.is_alive()
        return max((_shell_code(one.exit_code) for one in living), default=0)


class _Running:
    """A command that is kept, and what is known of its process.

    has_answered: since it was started last.
    """

    def __init__(self, kept: Kept, supervisor: Supervisor):
        self.kept = kept
        self.exit_code: int | None = None
        self.has_answered = self.has_ever_answered = self.answers = False
        self._supervisor = supervisor
        self._connection: socket.socket | None = None
        self._interval_s = kept.hung_after_s / MAX_FAILURES
        self._num_failures = 0
        self._began_s, self._asked_s = time.monotonic(), 0.0
        self._start_at_s: float | None = None if kept.pid else self._began_s

    def look(self) -> None:
        """Do what is to be done now."""
        now_s = time.monotonic()
        if self._start_at_s is not None:
            if now_s >= self._start_at_s:
                self._start()
        elif not self.is_alive():
            self._died()
        elif (
            self._num_failures >= MAX_FAILURES
            if self.has_answered
            else now_s - self._began_s > self.kept.start_timeout_s
        ):
            say(f"{self.kept.name} does not answer and is killed")
            self.kept.kill()
        else:
            self._ask(now_s)
            self._forget_deaths(now_s)
        if self.kept.log:
            rotate(Path(self.kept.log))

    def pause_s(self) -> float:
        """Seconds until there is something to do."""
        if self._start_at_s is not None:
            return max(0.0, self._start_at_s - time.monotonic())
        return min(LOOK_EVERY_S, self._interval_s)

    def is_alive(self) -> bool:
        """Whether its process runs; reaps it."""
        if self.kept.alive():
            return True
        if self.kept.pid:
            with contextlib.suppress(ChildProcessError):  # others started it
                pid, status = os.waitpid(self.kept.pid, os.WNOHANG)
                self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
            self.kept.pid = None
        return False

    def _start(self) -> None:
        kept = self.kept
        self._start_at_s, self.exit_code, self.has_answered = None, None, False
        self._num_failures = 0
        self._began_s, self._asked_s = time.monotonic(), 0.0
        try:
            end_processes(kept.relatives)
            if not self._supervisor.finds_home():
                raise FileNotFoundError(errno.ENOENT, "its home was moved; call `lifecycle up` in the new place")
            kept.start()
        except OSError as error:
            say(f"{kept.name} cannot be started: {error}")
            kept.pid, self.exit_code = None, 127
            return
        self._supervisor.record(kept)

    def _died(self) -> None:
        self._stop_asking()
        self.answers = False
        self.kept.deaths += 1
        if not (self._supervisor.plan.home or self.has_ever_answered):
            return  # it has said why, and is not started again
        # At once for the first time; then after 1, 2, 4, … s.
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (self.kept.deaths - 2)) if self.kept.deaths > 1 else 0.0
        self._start_at_s = time.monotonic() + pause_s
        when = f"in {pause_s:.0f} s" if pause_s else "now"
        say(f"{self.kept.name} {_in_words(self.exit_code)}; it is started again {when} (deaths: {self.kept.deaths})")
        if pause_s:  # else its next process is noted in a moment
            self._supervisor.record(self.kept)

    def _forget_deaths(self, now_s: float) -> None:
        if self.kept.deaths and self.has_answered and now_s - self._began_s > LIVED_S:
            self.kept.deaths = 0
            self._supervisor.record(self.kept)

    def _ask(self, now_s: float) -> None:
        """Ask whether it is healthy, and wait for the answer in the supervisor's loop."""
        if self._connection and now_s - self._asked_s > min(ANSWER_TIMEOUT_S, self._interval_s):
            self._stop_asking()
            self._note_answer(b"")
        pause_s = self._interval_s if self.has_answered else min(LOOK_EVERY_S, self._interval_s)
        if not self._connection and now_s - self._asked_s >= pause_s:
            self._asked_s = now_s
            where = f"{self.kept.host}:{self.kept.port}"
            request = f"GET {self.kept.health_path} HTTP/1.1\r\nHost: {where}\r\nConnection: close\r\n\r\n"
            try:
                connection = socket.create_connection((self.kept.host, self.kept.port), CONNECT_TIMEOUT_S)
                connection.sendall(request.encode())
            except OSError:
                self._note_answer(b"")
                return
            self._connection = connection
            self._supervisor.selector.register(connection, selectors.EVENT_READ, self._take_answer)

    def _take_answer(self) -> None:
        assert self._connection
        answer = b""
        with contextlib.suppress(OSError):
            answer = self._connection.recv(64)
        self._stop_asking()
        self._note_answer(answer)

    def _note_answer(self, answer: bytes) -> None:
        protocol, status, *_ = [*answer.split(maxsplit=2), b"", b""]
        is_http = protocol.startswith(b"HTTP/") and status.isdigit()
        self.answers = is_http and int(status) < 500
        excused = is_http and self.kept.needs and not self._supervisor.answers(self.kept.needs)
        self._num_failures = 0 if self.answers or excused else self._num_failures + 1
        if self.answers and not self.has_answered:
            self.has_answered = self.has_ever_answered = True
            say(f"{self.kept.name} answers")

    def _stop_asking(self) -> None:
        if self._connection:
            self._supervisor.selector.unregister(self._connection)
            self._connection.close()
            self._connection = None


def say(text: str) -> None:
    """Write a line to the log; a full disk ends nothing."""
    with contextlib.suppress(OSError):
        print(f"{_now()} {text}", flush=True)


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "seconds")


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "has died"
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _inode(folder: str) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return Path(folder).stat().st_ino if folder else None
    return None


def _shell_code(exit_code: int | None) -> int:
    return 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code or 0


def main() -> None:
    """Keep what the plan says; with --detach, in a process of its own, whose parent is none of ours."""
    plan = Plan.read(int(sys.argv[1]))
    for descriptor in plan.descriptors():
        os.set_inheritable(descriptor, False)
    if sys.argv[2:] == ["--detach"]:
        began, begun = os.pipe()
        if os.fork():
            os.close(begun)
            os.read(began, 1)
            os._exit(0)
        supervisor = Supervisor(plan)
        os.close(began)
        os.close(begun)
    else:
        supervisor = Supervisor(plan)
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
