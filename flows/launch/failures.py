"""Diagnosis of failed stage processes: the stage's own error, a signal, or the kernel's out-of-memory killer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flows.store.content import LOG_FILE
from stages.core.contract import StageConfig, StageFailure, StageResult
from stages.core.errors import (
    LifecycleError,
    ResourceError,
    StageCrashError,
    TransientError,
    class_name,
    error_classes,
    full_disk_message,
)
from stages.core.fields import what_is_wrong
from stages.core.files import read_end, write_atomically
from stages.core.supervised import signal_of, was_killed

LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 16_384
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\).*?rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
RANK_FAILURE = re.compile(r"^ *rank +: (?P<rank>\d+).*?^ *exitcode +: (?P<code>-?\d+)", re.DOTALL | re.MULTILINE)
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
COUNTERS = ("memory.events", "memory.oom_control")
"""Names of the files in which the kernel counts out-of-memory kills in cgroups v2 and v1 (the line `oom_kill N`)."""
INTERRUPTED = 128 + signal.SIGTERM
"""Exit code of a program that ended because it was asked to, by SIGTERM."""
LIMITS = ("memory.max", "memory.limit_in_bytes")
GIB = 2**30


def failure_of(work: Path, name: str, exit_code: int, log_begin: int = 0, about_memory: str = "") -> LifecycleError:
    """Return the error to report for a stage that exited with a code other than 0.

    That is the stage's own error (`error.json`) if it left one; otherwise a `StageCrashError` that names the signal,
    the rank, the log and its last lines. log_begin: byte of the log at which this attempt's output begins.
    about_memory: said of a SIGKILL, which is also how the kernel ends a process for lack of memory.
    """
    failure = StageFailure.read_or_none(work / "error.json")
    known = error_classes()
    if failure and failure.error in known:
        return known[failure.error](failure.message, died=failure.died)
    log = read_end(work / LOG_FILE, LOG_TAIL_BYTES, log_begin)
    excerpt = _excerpt(work, log)
    killed = _killed_rank(log, about_memory)
    if failure and killed:  # the error that other ranks left is only a consequence
        return StageCrashError(f"{name} ended, because {killed}\n{excerpt}", died=True)
    if failure:
        return StageCrashError(f"{name} failed: {failure.error}: {failure.message}\n{excerpt}")
    if exit_code == TransientError.exit_code:
        return TransientError(f"{name} asked to be tried again\n{excerpt}")
    if exit_code == ResourceError.exit_code:  # on a full disk, the exit code is all that a stage can leave
        return ResourceError("\n".join([full_disk_message(f"running {name}", work), *([excerpt] if log else [])]))
    ended, code = _how_it_ended(log, exit_code, about_memory)
    return StageCrashError(f"{name} {ended} and left no error message\n{excerpt}", died=was_killed(code))


def leave_error(work: Path, error: LifecycleError) -> int:
    """Write `error.json` for a stage that could not start, as a failing stage does; return the error's exit code."""
    write_atomically(work / "error.json", StageFailure.of(error).model_dump_json(indent=2))
    print(f"{class_name(error)}: {error}", flush=True)
    return error.exit_code


def read_result(work: Path, name: str) -> StageResult:
    """Read `result.json` of a stage that exited with 0. Raises `StageCrashError` when the file cannot be read."""
    try:
        return StageResult.model_validate_json((work / "result.json").read_bytes())
    except (OSError, ValidationError) as error:
        reason = f"{name} exited with 0, but left no readable result.json ({what_is_wrong(error)})"
        raise StageCrashError(f"{reason}\n{_excerpt(work, read_end(work / LOG_FILE, LOG_TAIL_BYTES))}") from error


def _how_it_ended(log: str, exit_code: int, about_memory: str) -> tuple[str, int]:
    """Return how a stage's process ended, and the first exit code; of several nodes' Slurm returns the highest."""
    if exit_code < 0:
        return f"ended, because its supervisor was killed by {_signal_name(-exit_code)}", exit_code
    root_causes = list(ROOT_CAUSE.finditer(log))
    if root_causes:
        rank, code = root_causes[-1]["rank"], int(root_causes[-1]["code"])
        return f"ended, because rank {rank} {_how(code, about_memory)}", code
    return _how(exit_code, about_memory), exit_code


def _killed_rank(log: str, about_memory: str) -> str | None:
    """Return which rank was killed, and by which signal, or None; kills by torchrun itself do not count."""
    failures = [(match["rank"], int(match["code"])) for match in RANK_FAILURE.finditer(log)]
    killed = [(rank, code) for rank, code in failures if was_killed(code)]
    return f"rank {killed[-1][0]} {_how(killed[-1][1], about_memory)}" if killed else None


def _how(exit_code: int, about_memory: str) -> str:
    number = signal_of(exit_code)
    if number is None:
        return f"exited with {exit_code}"
    known = f" ({about_memory})" if about_memory and number == signal.SIGKILL else ""
    return f"was killed by {_signal_name(number)}{known}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _excerpt(work: Path, log: str) -> str:
    lines = log.splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"its log, {work / LOG_FILE}, ends with:", *(f"  {line}" for line in lines)])


@dataclass(frozen=True)
class MemoryKills:
    """Counter of out-of-memory kills in this process's memory cgroup (`group`; None for the root cgroup)."""

    group: Path | None
    cgroups: Path = CGROUPS
    proc: Path = PROC

    @classmethod
    def here(cls, cgroups: Path = CGROUPS, proc: Path = PROC) -> MemoryKills:
        """Find the memory cgroup of this process. cgroups, proc: where these file systems are mounted."""
        # Version 2 has one line, `0::/PATH`; version 1 one for each set of controllers, such as `4:memory:/PATH`.
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mounted = cgroups / controllers if controllers else cgroups
            # A container without a cgroup namespace names the host's path, and has its own cgroup mounted at the root.
            for group in (mounted / path.lstrip("/"), mounted):
                if any((group / name).is_file() for name in COUNTERS):
                    return cls(group, cgroups, proc)
        return cls(None, cgroups, proc)

    def count(self) -> int:
        """Return how many processes the kernel has killed for lack of memory, in the cgroup or else on the machine."""
        files = [self.group / name for name in COUNTERS] if self.group else [self.proc / "vmstat"]
        for file in files:
            if file.is_file():
                fields = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
                return int(fields.get("oom_kill", 0))
        return 0

    def limit(self) -> str:
        """Return the smallest memory limit of the cgroup as text; without a limit, the machine's memory."""
        limits = list(self._limits())
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        least_bytes, file = min(limits, default=(machine_bytes, None))
        if file is None or least_bytes >= machine_bytes:  # cgroups v1 use a huge number for no limit
            return f"{machine_bytes / GIB:.1f} GiB, all memory of this machine"
        return f"{least_bytes / GIB:.1f} GiB limit of {file}"

    def _limits(self) -> Iterator[tuple[int, Path]]:
        if self.group is None:
            return
        # A group is also held to the limits of those above it.
        for group in (self.group, *self.group.parents):
            for file in (group / name for name in LIMITS):
                if file.is_file() and (limit := file.read_text().strip()) != "max":
                    yield int(limit), file
            if group == self.cgroups:
                return


def out_of_memory_message(name: str, config: StageConfig, kills: MemoryKills) -> str:
    """Return the error message for a stage that the kernel killed for lack of memory, with the limit and a remedy."""
    return f"{name} was killed by the kernel, out of memory: {kills.limit()}; {config.LESS_MEMORY}"
