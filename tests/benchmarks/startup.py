"""Benchmark of training start-up: seconds from the start of the process to the end of the first optimizer step.

Run: `python tests/benchmarks/startup.py`.
The quickstart's model and data, tokenized before, one process. Prints the median of several starts (the bound is 12 s)
and the imports that take longest.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workload import run_stage, stage_input

from stages.hubs.builtin import addition, qwen3

IMPORTS_SHOWN = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="train-startup-") as folder:
        root = Path(folder)
        for name, maker in (("model/model", qwen3), ("chats/data", addition)):
            (root / name).mkdir(parents=True)
            maker.make(root / name)
        starts_s = [seconds_to_first_step(root, index) for index in range(arguments.rounds + 1)]
    print(f"first start, which tokenizes the data: {starts_s[0]:.1f} s")
    print(f"median of {arguments.rounds} further starts: {statistics.median(starts_s[1:]):.1f} s")
    print("\n".join(slowest_imports("stages.kinds.train.run", "stages.engines.fsdp.engine")))


def seconds_to_first_step(root: Path, index: int) -> float:
    """Run a train stage; return the wall-clock seconds from its start to its first logged training step."""
    given = stage_input(root, name=f"start-{index}", steps=1)
    start_ms = time.time() * 1000
    (first_step,) = run_stage(root, given, threads=os.cpu_count() or 1)
    return (first_step["time_ms"] - start_ms) / 1000


def slowest_imports(*modules: str) -> list[str]:
    """Return the packages that take longest to import, with their seconds, as lines to print."""
    program = f"from stages.models import start_up; start_up.start_training_quickly(); import {', '.join(modules)}"
    command = [sys.executable, "-X", "importtime", "-c", program]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    self_us: dict[str, int] = {}
    for line in report.splitlines()[1:]:
        fields = line.removeprefix("import time:").split("|")
        package = ".".join(fields[2].strip().split(".")[:2])
        self_us[package] = self_us.get(package, 0) + int(fields[0])
    slowest = sorted(self_us.items(), key=lambda entry: -entry[1])[:IMPORTS_SHOWN]
    total = f"imports: {sum(self_us.values()) / 1e6:.2f} s"
    return [total, *(f"  {microseconds / 1e6:6.2f} s  {package}" for package, microseconds in slowest)]


if __name__ == "__main__":
    main()
