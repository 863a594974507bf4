"""Search for what a fault test leaves behind: processes, shared memory, held locks and temporary files.

Every process that a fault test starts inherits a mark in its environment, and a TMPDIR of the session. Where the kernel
allows it (root), the session gets a /dev/shm of its own, so that everything left there comes from the tests; elsewhere
new files there count that no living process has open.
"""

import ctypes
import fcntl
import os
import uuid
from pathlib import Path

from flows.servers.lock import Lock
from stages.core.process_tree import living_processes, marked_processes

MARK_VARIABLE = "FAULT_TESTS"
SHARED_MEMORY = Path("/dev/shm")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x0002_0000, 0x4000, 0x4_0000
DAEMONS = ("slurmd", "slurmctld", "slurmstepd", "munged", "postgres")
"""Programs of daemons that outlive a single test, so that they do not count as left behind."""


class Leftovers:
    """Finder of what a test leaves behind: snapshots of processes, shared memory, locks and files, to be compared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = f"{MARK_VARIABLE}={uuid.uuid4().hex}"
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self.has_own_shared_memory = _mount_own_shared_memory()

    def environment(self) -> dict[str, str]:
        """Return the environment variables that mark the processes started by tests."""
        return {MARK_VARIABLE: self._mark.partition("=")[2], "TMPDIR": str(self._temporary)}

    def look(self) -> dict[str, set[str]]:
        """Return a snapshot of test processes (not shared servers), shared memory, held locks and temporary files."""
        # Not by `glob`, which raises where a folder goes meanwhile, as those of running servers do.
        files = [Path(place, name) for place, _, names in os.walk(self._folder) for name in names]
        servers = self._servers(files)
        processes = {pid: _command(pid) for pid in marked_processes(self._mark) if pid != os.getpid()}
        others = {pid: command for pid, command in processes.items() if pid not in servers and not _is_daemon(command)}
        return {
            "process": {f"{pid} {command}" for pid, command in others.items() if command},
            "shared memory": self._shared_memory(),
            "held lock": {
                str(path) for path in files if path.parent.name == ".locks" and path.exists() and _is_held(path)
            },
            # Shared servers have temporary files of their own while they run.
            "temporary file": set() if servers else {path.name for path in self._temporary.iterdir()},
        }

    def _shared_memory(self) -> set[str]:
        files = {str(path) for path in SHARED_MEMORY.iterdir()}
        return files if self.has_own_shared_memory else files - _open_files()

    def _servers(self, files: list[Path]) -> set[int]:
        """Return the process ids of servers that `lifecycle up` started (Prefect, MLflow) and of their supervisors."""
        records = [path.read_text() for path in files if path.name == "servers.json" and path.exists()]
        locks = [path for path in files if (path.parent.name, path.name) == ("supervisor", "lock")]
        supervisors = {Lock(path.parents[1]).holder() for path in locks} - {None}
        environments = {pid: _environment(pid) for pid in marked_processes(self._mark)}
        return supervisors | {
            pid
            for pid, environment in environments.items()
            if any(token in text for text in records for token in _tokens(environment))
        }


def new(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    """Return what a test left behind, a line each: everything in the later snapshot but not in the earlier one."""
    return [f"{kind}: {thing}" for kind, things in after.items() for thing in sorted(things - before[kind])]


def _mount_own_shared_memory() -> bool:
    """Mount a tmpfs on /dev/shm that only this process and its children see; return whether that succeeded."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", bytes(SHARED_MEMORY), b"tmpfs", 0, b"size=4g") == 0
    )


def _is_held(path: Path) -> bool:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_daemon(command: str) -> bool:
    return Path(command.partition(" ")[0].rstrip(":")).name in DAEMONS


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _tokens(environment: str) -> list[str]:
    """Return the tokens in a process's environment variables that mark it as a child of our supervisor or servers."""
    variables = (line.partition("=") for line in environment.split("\0"))
    return [value for name, _, value in variables if name.endswith("_TOKEN") and name.startswith("LIFECYCLE") and value]


def _open_files() -> set[str]:
    """Return the shared-memory files that a living process has mapped, which therefore do not count as left behind."""
    found = set()
    for pid in living_processes():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in lines if str(SHARED_MEMORY) in line}
    return found
