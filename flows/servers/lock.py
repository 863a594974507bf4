"""Lock that lets only one supervisor run the local servers, and hand-over of their sockets to the next supervisor."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.servers.supervised_commands import HandOver

HAND_OVER_TIMEOUT_S = 5.0


def supervisor_folder(home: str | Path) -> Path:
    """Return the folder for the lock and the log of a lifecycle home's supervisor."""
    return Path(home) / "supervisor"


class Lock:
    """Lock file of a lifecycle home's supervisor. Its content names the supervisor that holds it (`Holder`)."""

    def __init__(self, home: Path):
        self.path = supervisor_folder(home) / "lock"

    def holder(self) -> int | None:
        """Return the process id of this machine's supervisor; None when none runs here."""
        try:
            with self.path.open("rb") as stream:
                # Shared, so that two that look at once do not take each other for the holder.
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            found = self._holder()
            return found.pid if found else None
        return None

    def take(self) -> HandOver | None:
        """Take over from the previous supervisor, which ends; return its lock and the commands that it supervised.

        One that hangs is killed. None when the lock is held on another machine or in another container.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not truncated: the file names the holder.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # No supervisor runs: there is nothing to take over.
        if self._acquire(descriptor, 0.0):
            return HandOver(lock=descriptor)
        handed = HandOver()
        # None: it runs elsewhere, and its socket cannot be reached from here.
        if holder := self._holder():
            try:
                handed = _ask_to_hand_over(holder.address)
            except OSError:
                with contextlib.suppress(ProcessLookupError):
                    # It hangs; its commands live on and are found by the records; their sockets are not handed over.
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

    def _holder(self) -> Holder | None:
        """Return the supervisor that holds the lock, if it runs on this machine; else None."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            holder = Holder(**json.loads(self.path.read_text()))
            command = Path(f"/proc/{holder.pid}/cmdline").read_bytes()
            if holder.machine == this_machine() and b"flows.servers.supervisor" in command:
                return holder
        return None


@dataclass
class Holder:
    """Content of the supervisor's lock file: its holder's process id, and the Unix socket to request a hand-over."""

    pid: int
    address: str
    machine: str

    def note(self, lock: int) -> None:
        """Write the supervisor's process id and socket address to the lock file; the supervisor must hold the lock."""
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(asdict(self)).encode(), 0)


def this_machine() -> str:
    """Return an id of this machine and container, to recognise supervisors of others that share the lifecycle home."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _ask_to_hand_over(address: str) -> HandOver:
    """Ask a supervisor to hand over its commands and sockets, after which it ends. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        connection.connect(bytes.fromhex(address))
        if not is_of_this_user(connection):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "a process of another user")
        # The plan in memory, then the listening sockets in the order of its commands.
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 64)
    if not descriptors:
        raise ConnectionResetError(errno.ECONNRESET, "handed nothing over")
    plan = HandOver.read(descriptors[0])
    sockets = iter(descriptors[1:])
    for one in plan.kept:
        if one.descriptor is not None:
            one.descriptor = next(sockets)
    # The number of a descriptor in the other process; the lock is taken when that has ended.
    plan.lock = None
    return plan


def is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user."""
    # struct ucred: pid, uid, gid.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
