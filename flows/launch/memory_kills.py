"""Out-of-memory kills, as the kernel counts them for the memory cgroup that this process and its stages are in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import StageConfig

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
COUNTERS = ("memory.events", "memory.oom_control")
"""Of cgroups v2 and v1; in both, a line `oom_kill N` counts processes."""
LIMITS = ("memory.max", "memory.limit_in_bytes")
GIB = 2**30


@dataclass(frozen=True)
class MemoryKills:
    """Where kills are counted. group: the memory cgroup; None where this process is in none but the root."""

    group: Path | None
    cgroups: Path = CGROUPS
    proc: Path = PROC

    @classmethod
    def here(cls, cgroups: Path = CGROUPS, proc: Path = PROC) -> MemoryKills:
        """Find the cgroup of this process. cgroups, proc: where these file systems are mounted."""
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
        """Return how many processes of the group the kernel has killed; outside any group, of the machine."""
        files = [self.group / name for name in COUNTERS] if self.group else [self.proc / "vmstat"]
        for file in files:
            if file.is_file():
                fields = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
                return int(fields.get("oom_kill", 0))
        return 0

    def limit(self) -> str:
        """Return the least limit that holds for the group, for people; without one, the machine's memory."""
        limits = list(self._limits())
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        least_bytes, file = min(limits, default=(machine_bytes, None))
        if file is None or least_bytes >= machine_bytes:  # cgroups v1 call no limit a huge one
            return f"{machine_bytes / GIB:.1f} GiB, all memory of this machine"
        return f"{least_bytes / GIB:.1f} GiB limit of {file}"

    def _limits(self) -> Iterator[tuple[int, Path]]:
        if self.group is None:
            return
        for group in (self.group, *self.group.parents):
            for file in (group / name for name in LIMITS):
                if file.is_file() and (limit := file.read_text().strip()) != "max":
                    yield int(limit), file
            if group == self.cgroups:
                return


def out_of_memory_message(name: str, config: StageConfig, kills: MemoryKills) -> str:
    """Return what is said of a stage that the kernel killed for its memory."""
    return f"{name} was killed by the kernel, out of memory: {kills.limit()}; {config.LESS_MEMORY}"
