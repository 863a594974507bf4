"""Launcher of `megatron_state_program.py` on models in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.parity.ranks import Ranks


def launch(ranks: Ranks, processes: int, models: Path, output: Path, **todo: Any) -> None:
    """Run `megatron_state_program` on the tasks `todo` in this number of processes."""
    output.mkdir(parents=True, exist_ok=True)
    spec = output / f"spec-{processes}.json"
    spec.write_text(json.dumps({"models": str(models), "output": str(output), **todo}))
    ranks.run("tests.parity.megatron_state_program", processes, spec, log=output / f"log-{processes}.txt")
