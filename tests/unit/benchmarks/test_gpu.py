"""The accelerator benchmark also runs on a CPU with a tiny model; when restarted, it skips finished measurements."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.compare.calibration import why_left_out
from flows.tracking.logged_runs import measured_runs

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "benchmarks" / "gpu.py"


def run(out: Path, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), "--out", str(out), "--device", "cpu", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parts_are_measured_once_and_calibration_can_read_them(tmp_path: Path) -> None:
    first = run(tmp_path, "--only", "* full fsdp")
    rows = {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())}
    row = rows["tiny 128 full fsdp"]
    assert row["status"] == "measured", row
    assert "tiny 128 full fsdp: measured" in first
    assert "| tiny 128 full fsdp |" in (tmp_path / "gpu.md").read_text()
    metrics = row["metrics"]
    assert metrics["tokens_per_s"] * metrics["step_time_s"] == pytest.approx(8 * 128)
    assert metrics["mfu"] > 0
    assert len(row["steps_s"]) == 5
    runs = measured_runs(tmp_path / "gpu.json")
    assert runs and [why_left_out(one) for one in runs] == [None] * len(runs)
    assert "measured" not in run(tmp_path, "--only", "* full fsdp", "--limit-s", "1").split("|")[0]


def test_a_part_without_time_is_left_for_the_next_start(tmp_path: Path) -> None:
    run(tmp_path, "--only", "rates", "--limit-s", "1")
    assert not (tmp_path / "gpu.json").exists()


def test_every_combination_is_measured_once_the_most_wanted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    gpu = importlib.import_module("gpu")
    parts = [what for what in gpu.ordered("cuda") if isinstance(what, gpu.Part)]
    assert len(set(parts)) == len(parts) == 4 * 2 * 2 * 5 + 1, "and one in 8 bits"
    assert [gpu.name_of(what) for what in gpu.ordered("cuda")][:5] == [
        "rates",
        "test_kernels_on_gpu.py",
        "0.6b 4096 full fsdp",
        "8b 4096 LoRA fsdp",
        "8b 4096 LoRA fsdp compiled",
    ]
    tests = {what.split()[0] for what in gpu.ordered("cuda") if isinstance(what, str)} - {"rates"}
    assert tests == {file.name for file in (ROOT / "tests/gpu").glob("test_*.py")}
