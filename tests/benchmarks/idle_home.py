"""Benchmark of an idle lifecycle home with one nightly schedule: CPU and memory of its servers, worker and supervisor.

python tests/benchmarks/idle_home.py [SECONDS]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
WARM_UP_S = 20.0


def lifecycle(home: Path, *arguments: str) -> None:
    environment = {**os.environ, "LIFECYCLE_HOME": str(home)}
    subprocess.run([LIFECYCLE, *arguments], env=environment, check=True, capture_output=True)


def processes_of(home: Path) -> dict[int, str]:
    """Return process id and command of all processes whose environment has this folder as LIFECYCLE_HOME."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"LIFECYCLE_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_text().split("\0")
                found[int(process.name)] = " ".join(command[1:5])
        except OSError:
            continue
    return found


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    """Return the memory of a process in MiB as PSS, in which shared memory counts in proportion to its users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 180.0
    with tempfile.TemporaryDirectory(prefix="idle-home-") as folder:
        home = Path(folder)
        lifecycle(home, "schedule", str(RECIPE), "--cron", "0 3 * * *")
        try:
            time.sleep(WARM_UP_S)
            processes = processes_of(home)
            before = {pid: cpu_s(pid) for pid in processes}
            time.sleep(seconds)
            used = {pid: 100 * (cpu_s(pid) - before[pid]) / seconds for pid in processes}
            memory = {pid: pss_mib(pid) for pid in processes}
        finally:
            lifecycle(home, "down")
        for pid, command in processes.items():
            print(f"{command:<60} {used[pid]:5.2f}% of a core  {memory[pid]:6.0f} MiB")
        print(f"{'all':<60} {sum(used.values()):5.2f}% of a core  {sum(memory.values()):6.0f} MiB")


if __name__ == "__main__":
    main()
