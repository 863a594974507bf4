"""Program that restarts commands when they die or hang: the local servers and the worker, or a served champion.

python -m flows.servers.supervisor DESCRIPTOR

DESCRIPTOR is a file in memory that holds a `HandOver` as JSON: environments hold secrets, which must lie on no disk.
The supervisor imports the standard library alone, since it stays for as long as the machine runs.

It holds the listening socket of each command (`supervised_commands.py`): when a command dies, clients wait in the
socket's queue until its successor answers. A command that lives, but does not answer, is killed.

The supervisor of a home holds a lock (`lock.py`) that the kernel releases when it dies; `lifecycle up` and `down` ask
it to hand over what it keeps, and to end. `keep` turns a process into the supervisor of one command.
"""

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from flows.servers.lock import Holder, is_of_this_user, supervisor_folder, this_machine
from flows.servers.supervised_commands import SYSTEMD_VARIABLES, HandOver, SupervisedCommand, open_log, rotate, say
from stages.core.process_tree import TOKEN_VARIABLE, end_processes, send

LOOK_EVERY_S = 1.0
MAX_FAILURES = 6
"""Failed health checks in a row before a restart; a time limit would also count the supervisor's own delays."""
ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 0.2
LIVED_S = 60.0
"""Seconds after which a running command counts as stable, so that its earlier deaths are forgotten."""
LONGEST_PAUSE_S = 60.0


def keep(kept: SupervisedCommand, public: socket.socket) -> NoReturn:
    """Turn this process into the foreground supervisor of one command, whose listening socket is `public`.

    The command ends when this process does, however that ends. After SIGTERM and SIGINT it gets a SIGTERM, and all the
    time that it wants; the exit code is its own. So it is when the command ends before it has ever answered. Later, one
    that dies or hangs is started again with the same socket and environment. systemd hears that it is ready
    (`Type=notify`) with the first answer, and that it lives (`WatchdogSec=`).
    """
    kept.descriptor, kept.dies_with_us = public.detach(), True
    become(HandOver([kept]))


def become(plan: HandOver) -> NoReturn:
    """Turn this process into the supervisor of the given commands."""
    # Exec discards what is still in Python's buffer.
    sys.stdout.flush()
    plan_descriptor = plan.in_memory()
    for descriptor in (*plan.descriptors(), plan_descriptor):
        # Python makes descriptors that an exec closes.
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [*_COMMAND, str(plan_descriptor)])  # noqa: S606 (no shell)


def start(plan: HandOver) -> None:
    """Start the supervisor of the local servers in the background; it outlives this process."""
    folder = supervisor_folder(plan.home)
    plan_descriptor = plan.in_memory()
    # Systemd watches the caller, not this process; with its token it would be ended along with the caller.
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
            # A Ctrl-C in the caller's terminal does not reach it.
            start_new_session=True,
            check=True,
        )
    for descriptor in (*plan.descriptors(), plan_descriptor):
        os.close(descriptor)


_COMMAND = [sys.executable, "-m", "flows.servers.supervisor"]


def notify(state: str) -> None:
    """Send a state such as `READY=1` to systemd, if it started this process as a service of `Type=notify`."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(0.2)  # if systemd hangs and its queue is full
            # `@` stands for the NUL with which abstract addresses begin.
            connection.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)


class Supervisor:
    """Event loop that restarts supervised commands when they die or hang, until it is stopped or replaced."""

    def __init__(self, plan: HandOver):
        self.plan = plan
        # Of the folder, not its path: a home that was moved is recognised, and so is another one at its place.
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
        """Supervise the commands until stopped or replaced by another supervisor; return the exit code to end with."""
        while not self.num_stop_requests:
            for one in self.running:
                one.look()
            if not self.is_ready and all(one.has_answered for one in self.running):
                self.is_ready = True
                notify("READY=1")
            if self.plan.home:
                rotate(supervisor_folder(self.plan.home) / "server.log")
            # Only in the foreground: a mistake in the command's arguments would end every further start as well.
            elif failed := [one.exit_code for one in self.running if one.kept.deaths and not one.has_ever_answered]:
                return _shell_code(failed[0])
            self._wait(min([LOOK_EVERY_S, *(one.pause_s() for one in self.running)]))
            if self.handed_over:
                return 0
        notify("STOPPING=1")
        return self._stop_home() if self.plan.home else self._stop_commands()

    def finds_home(self) -> bool:
        """Return whether the lifecycle home is still at its path, and is the same folder, not a copy of it."""
        return _inode(self.plan.home) == self._home_inode

    def answers(self, name: str) -> bool:
        """Return whether this supervisor runs the named command and the command's last health check succeeded."""
        return any(one.answers for one in self.running if one.kept.name == name)

    def record(self, kept: SupervisedCommand) -> None:
        """Write the process of a supervised command, and its deaths in a row, into the records of local servers."""
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
        """Sleep until a signal, a hand-over request or the timeout; then tell systemd's watchdog that it lives."""
        for key, _ in self.selector.select(timeout_s):
            key.data()
        if "WATCHDOG_USEC" in os.environ:
            notify("WATCHDOG=1")

    def _listen_to_signals(self) -> None:
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal writes a byte here, which wakes `select`; it would go on waiting after the handler has run.
        signal.set_wakeup_fd(writable)
        # A handler of any kind, since only signals with a handler write a byte.
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
        Holder(os.getpid(), listener.getsockname().hex(), this_machine()).note(lock)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._hand_over(listener))

    def _hand_over(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            # An abstract address has no file whose mode would keep other users away.
            if not is_of_this_user(connection):
                return
            # In the order in which `lock.py` gives them to the commands of the plan.
            sockets = [one.descriptor for one in self.plan.kept if one.descriptor is not None]
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [b"!"], [self.plan.in_memory(), *sockets])
                # This process ends after the present round, which releases the lock: the successor waits for that.
                self.handed_over = True
                self.selector.unregister(listener)
                if self.num_stop_requests:  # else our end, which is near, releases the lock
                    self.plan.release()

    def _stop_home(self) -> int:
        """Stop the local servers by running `lifecycle down`, which first takes over from this supervisor."""
        command = [sys.executable, "-c", "from flows.cli.main import main; main(['down'])"]
        stopping = subprocess.Popen(command, env=self._environment())
        # `down` asks for the hand-over, which happens in `_wait`.
        while stopping.poll() is None:
            self._wait(0.1)
        return stopping.returncode

    def _stop_commands(self) -> int:
        living = [one for one in self.running if one.is_alive()]
        send(signal.SIGTERM, [one.kept.pid for one in living if one.kept.pid])
        # As long as it takes; a second request kills.
        while any(one.is_alive() for one in living) and self.num_stop_requests == 1:
            self._wait(LOOK_EVERY_S)
        for one in living:
            end_processes(one.kept.relatives)
            # Collects the exit code.
            one.is_alive()
        return max((_shell_code(one.exit_code) for one in living), default=0)


class _Running:
    """State of a supervised command: process, health checks (`has_answered`: since its start) and next restart."""

    def __init__(self, kept: SupervisedCommand, supervisor: Supervisor):
        self.kept = kept
        self.exit_code: int | None = None
        self.has_answered = self.has_ever_answered = self.answers = False
        self._supervisor = supervisor
        self._connection: socket.socket | None = None
        self._interval_s = kept.hung_after_s / MAX_FAILURES
        self._num_failures = 0
        self._began_s, self._asked_s = time.monotonic(), 0.0
        # One that was adopted runs already.
        self._start_at_s: float | None = None if kept.pid else self._began_s

    def look(self) -> None:
        """Start the supervised command, check its health, kill it when it hangs, or record its death, as is due."""
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
        """Return the seconds until the supervised command is next due for a restart or a health check."""
        if self._start_at_s is not None:
            return max(0.0, self._start_at_s - time.monotonic())
        return min(LOOK_EVERY_S, self._interval_s)

    def is_alive(self) -> bool:
        """Return whether the supervised command's process is alive; collect its exit code if it has ended."""
        if self.kept.alive():
            return True
        if self.kept.pid:
            with contextlib.suppress(ChildProcessError):  # others started it
                pid, status = os.waitpid(self.kept.pid, os.WNOHANG)
                if not pid:  # its first thread has ended, others have not: it has no exit code yet
                    return True
                self.exit_code = os.waitstatus_to_exitcode(status)
            self.kept.pid = None
        return False

    def _start(self) -> None:
        kept = self.kept
        self._start_at_s, self.exit_code, self.has_answered = None, None, False
        self._num_failures = 0
        self._began_s, self._asked_s = time.monotonic(), 0.0
        try:
            # What a dead command has left, such as its worker processes, may hold its databases or devices.
            end_processes(kept.relatives)
            if not self._supervisor.finds_home():
                raise FileNotFoundError(errno.ENOENT, "its home was moved; call `lifecycle up` in the new place")
            kept.start()
        except OSError as error:
            say(f"{kept.name} cannot be started: {error}")
            # The shell's code for a command that cannot be started; `look` then counts a death.
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
        """Send a health check to the command without waiting for the answer."""
        if self._connection and now_s - self._asked_s > min(ANSWER_TIMEOUT_S, self._interval_s):
            self._stop_asking()
            self._note_answer(b"")
        pause_s = self._interval_s if self.has_answered else min(LOOK_EVERY_S, self._interval_s)
        if not self._connection and now_s - self._asked_s >= pause_s:
            self._asked_s = now_s
            where = f"{self.kept.host}:{self.kept.port}"
            # Written by hand: urllib would block the loop until the answer comes.
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
            # The status line is enough; empty when the server has closed the connection.
            answer = self._connection.recv(64)
        self._stop_asking()
        self._note_answer(answer)

    def _note_answer(self, answer: bytes) -> None:
        # Padded, since the answer may be empty: b"HTTP/1.1 200 OK" -> protocol b"HTTP/1.1", status b"200".
        protocol, status, *_ = [*answer.split(maxsplit=2), b"", b""]
        is_http = protocol.startswith(b"HTTP/") and status.isdigit()
        self.answers = is_http and int(status) < 500
        # Such as the worker's 503 while Prefect is away, which a restart of the worker would not cure.
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


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "has died"
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _inode(folder: str) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return Path(folder).stat().st_ino if folder else None
    return None


def _shell_code(exit_code: int | None) -> int:
    # Killed by signal 9: Popen's -9 -> the shell's 137.
    return 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code or 0


def main() -> None:
    """Supervise the commands that another process handed over; with --detach, in a daemon that outlives the caller."""
    plan = HandOver.read(int(sys.argv[1]))
    for descriptor in plan.descriptors():
        # Not for all commands: each inherits its own socket alone, and none of them the lock.
        os.set_inheritable(descriptor, False)
    if sys.argv[2:] == ["--detach"]:
        # A daemon: the parent ends once the child listens for successors, which is when the child closes `begun`.
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
