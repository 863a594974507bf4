"""Files and folders of running `lifecycle serve --follow` processes, in `$LIFECYCLE_HOME/servers`.

canary-NAME-PID.json   tallies of a server's champion and challenger, for other commands of this machine
serving-…/             temporary files of the engines of one process

Files of killed processes are ignored; each new process removes their folders. A folder is in use while its lock is
held: the kernel releases a lock with its process on every machine that shares the home, where process numbers mean
nothing.
"""

import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.ledger.home import HomeIdentity, home, home_identity
from flows.ledger.process_identity import ProcessIdentity, Standing
from stages.core.files import write_atomically
from stages.core.process_tree import working_directories

IDENTITIES = ("process", "home")
"""Keys of a canary's file: its process and lifecycle home. Files by earlier versions of the program lack `home`."""
HEADING = ("version", "requests", "errors", "p50 s", "p95 s", "prompt tokens", "tokens", "ended by")
PREFIX = "serving-"
"""Prefix of a process's own folder. Earlier versions made folders without a lock, ending in an engine's name."""
LOCK = "lock"


def note_tallies(name: str, tallies: Mapping[str, Any]) -> None:
    """Write the request counts of a registered model's served versions to a file, for other commands to show."""
    _folder().mkdir(parents=True, exist_ok=True)
    identities = {"process": ProcessIdentity.own().model_dump(), "home": home_identity().model_dump()}
    noted = {"name": name, **identities, "time_s": time.time(), **tallies}
    write_atomically(_file(name), json.dumps(noted))


def forget_tallies(name: str) -> None:
    """Remove the request counts that the calling process wrote for its canary, which has ended."""
    _file(name).unlink(missing_ok=True)


def served_canaries(name: str) -> list[dict[str, Any]]:
    """Return the request counts of canaries on this machine, each with `time_s`, when they were written."""
    records = []
    for file in sorted(_folder().glob(f"canary-{glob.escape(name)}-*.json")):
        with suppress(FileNotFoundError):  # it has just ended
            noted = json.loads(file.read_bytes())
            # The pattern also matches models whose name begins with this one.
            if _standing(noted) == "alive" and noted["name"] == name:
                records.append({field: value for field, value in noted.items() if field not in ("name", *IDENTITIES)})
    return records


def left_notes() -> Iterator[Path]:
    """Yield the files with request counts that killed servers left; in a copied home, also those of the original's."""
    for file in sorted(_folder().glob("canary-*.json")):
        with suppress(FileNotFoundError):
            if _standing(json.loads(file.read_bytes())) == "dead":
                yield file


def _standing(noted: Mapping[str, Any]) -> Standing:
    """Return whether the server of a canary's counts is alive, dead (or of the copied home), or unknown from here."""
    if "home" in noted and not HomeIdentity.model_validate(noted["home"]).is_here():
        return "dead"
    return ProcessIdentity.model_validate(noted["process"]).standing()


def as_lines(canary: Mapping[str, Any]) -> list[str]:
    """Return the request counts of a canary as lines of text: a title, and a table with a row for each version."""
    age_s = max(0.0, time.time() - canary["time_s"])
    versions = (canary["champion"], canary["challenger"])
    rows = [HEADING, *(_row(one, canary) for one in canary["versions"] if one["version"] in versions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    title = f"served side by side, {canary['share']:.1%} of the requests to version {versions[1]}; {age_s:.0f} s ago:"
    return [title, *("  ".join(row).rstrip() for row in cells)]


def _row(counted: Mapping[str, Any], canary: Mapping[str, Any]) -> tuple[str, ...]:
    role = "champion" if counted["version"] == canary["champion"] else "challenger"
    latencies = (counted["latency_p50_s"], counted["latency_p95_s"])
    reasons = ", ".join(f"{reason} {count}" for reason, count in counted["finish_reasons"].items())
    return (
        f"{counted['version']}, {role}",
        str(counted["requests"]),
        str(counted["errors"]),
        *("–" if one is None else f"{one:.3g}" for one in latencies),
        str(counted["prompt_tokens"]),
        str(counted["completion_tokens"]),
        reasons or "–",
    )


def _folder() -> Path:
    return home() / "servers"


def _file(name: str) -> Path:
    return _folder() / f"canary-{name}-{os.getpid()}.json"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a new folder for the server that this process runs; remove the folder in the end."""
    servers = home() / "servers"
    servers.mkdir(parents=True, exist_ok=True)
    with (servers / "serving.lock").open("w") as makers:
        fcntl.flock(makers, fcntl.LOCK_EX)  # so that no folder is removed between its creation and its lock
        for left in servers.glob(f"{PREFIX}*/"):
            if not _is_locked(left):
                shutil.rmtree(left, ignore_errors=True)
        folder = TemporaryDirectory(prefix=PREFIX, dir=servers, ignore_cleanup_errors=True)
        lock = (Path(folder.name) / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    # The lock is closed first, and the folder removed after it: in between, another process may remove it, too.
    with folder, lock:
        yield Path(folder.name)


def left_folders() -> Iterator[Path]:
    """Yield the temporary folders that no running `serve --follow` process uses, those of earlier versions included."""
    in_use = working_directories()
    for folder in sorted((home() / "servers").glob("*/")):
        if folder.name.startswith(PREFIX):
            if not _is_locked(folder):
                yield folder
        elif folder.resolve() not in in_use:  # an engine works in its own
            yield folder


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            # A look only: closing the file gives the lock back.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:  # its process is alive
        return True
    return False
