"""Benchmark of `plan`, `show`, `gc --dry-run` and `runs` in a lifecycle home of 1,000 artifacts and 10,000 stage runs.

python tests/benchmarks/large_home.py
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows.ledger.events import AttemptBegan, AttemptEnded, PlannedEntry, RefreshBegan, RefreshEnded
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import Ledger
from flows.tracking.cursor import Shipped, ShippedAttempt, write_shipped

NUM_ARTIFACTS = 1_000
NUM_REFRESHES = 1_000
STAGES_PER_REFRESH = 10
LIFECYCLE = Path(sys.executable).with_name("lifecycle")
RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COMMANDS = (
    ("plan", str(RECIPE)),
    ("show",),
    ("gc", "--dry-run"),
    ("runs",),
    ("runs", "--stage", "stage-3", "--limit", "1000"),
)


def lifecycle(home: Path, *arguments: str) -> str:
    environment = {**os.environ, "LIFECYCLE_HOME": str(home)}
    return subprocess.run([LIFECYCLE, *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def fill_store(home: Path) -> None:
    """Fill the artifact store with copies of one small artifact, each under its own version."""
    rows = home / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n')
    adopted = json.loads(lifecycle(home, "adopt", str(rows), "--kind", "dataset", "--name", "rows", "--json"))
    artifact, version = Path(adopted["artifact"]), adopted["version"]
    record = (artifact / "record.json").read_text()
    for number in range(1, NUM_ARTIFACTS):
        copy = artifact.with_name(f"rows-{number:012x}")
        shutil.copytree(artifact, copy)
        (copy / "record.json").chmod(0o600)
        (copy / "record.json").write_text(record.replace(version, f"{number:012x}"))


def fill_ledgers(home: Path) -> None:
    for number in range(NUM_REFRESHES):
        ledger = Ledger(home / "ledger" / f"nightly-{number:04}")
        names = [f"stage-{position}" for position in range(STAGES_PER_REFRESH)]
        events = [
            RefreshBegan(
                refresh=ledger.folder.name,
                recipe="nightly",
                recipe_path=RECIPE,
                process=ProcessIdentity.own(),
                hardware="1 × abacus",
                git_commit=None,
                stages={name: PlannedEntry(kind="train", version="0123456789ab") for name in names},
            ),
            *(event for name in names for event in attempt(name, home)),
            RefreshEnded(state="completed", seconds=1.0),
        ]
        ledger.folder.mkdir(parents=True)
        ledger.file.write_text("".join(f"{event.model_dump_json()}\n" for event in events))
        shipped = {f"{name}-1": ShippedAttempt(run_id="0" * 32, next_byte=0, done=True) for name in names}
        write_shipped(ledger, Shipped(attempts=shipped, done=True, ledger_bytes=ledger.size()))


def attempt(stage: str, home: Path) -> list[AttemptBegan | AttemptEnded]:
    params = {f"parameter_{number}": str(number) for number in range(40)}
    tags = {"recipe": "nightly", "kind": "train", "version": "0123456789ab"}
    metrics = {f"metric_{number}": 1.0 for number in range(20)}
    return [
        AttemptBegan(stage=stage, number=1, work=home, first_byte=0, params=params, tags=tags),
        AttemptEnded(stage=stage, number=1, outcome="finished", folder=home, last_byte=0, metrics=metrics),
    ]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="large-home-") as folder:
        home = Path(folder)
        fill_store(home)
        fill_ledgers(home)
        print(f"{NUM_ARTIFACTS:,} artifacts, {NUM_REFRESHES * STAGES_PER_REFRESH:,} stage runs")
        for command in COMMANDS:
            began_s, began_cpu_s = time.perf_counter(), cpu_s()
            lines = lifecycle(home, *command).count("\n")
            seconds, seconds_of_cpu = time.perf_counter() - began_s, cpu_s() - began_cpu_s
            shown = " ".join(command).replace(str(RECIPE), RECIPE.name)
            print(f"{shown:<36} {seconds:6.2f} s  ({seconds_of_cpu:.2f} s of CPU)  {lines:>6,} lines", flush=True)


def cpu_s() -> float:
    """Return the CPU seconds of all `lifecycle` commands so far, which other load distorts less than wall time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
