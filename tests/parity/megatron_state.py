"""Helper that runs `megatron_state_program.py` (loading, exporting, resuming) on a folder of models."""

import json
from pathlib import Path
from typing import Any

from tests.parity.ranks import Ranks


def launch(ranks: Ranks, processes: int, models: Path, output: Path, **todo: Any) -> None:
    """Run `megatron_state_program.py` in so many processes with its tasks, such as round_trips or journeys."""
    output.mkdir(parents=True, exist_ok=True)
    spec = output / f"spec-{processes}.json"
    spec.write_text(json.dumps({"models": str(models), "output": str(output), **todo}))
    ranks.run("tests.parity.megatron_state_program", processes, spec, log=output / f"log-{processes}.txt")
