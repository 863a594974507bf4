"""Starts `megatron_state_program.py`, on models that lie in a folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from flows.launch.local import on_one_node

PROGRAM = Path(__file__).with_name("megatron_state_program.py")
ROOT = Path(__file__).parents[2]


def launch(processes: int, models: Path, output: Path, **todo: Any) -> None:
    """Do what the program's docstring says of `todo` in so many processes, started once."""
    output.mkdir(parents=True, exist_ok=True)
    spec = output / "spec.json"
    spec.write_text(json.dumps({"models": str(models), "output": str(output), **todo}))
    finished = subprocess.run(
        on_one_node([str(PROGRAM), str(spec)], processes),
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
