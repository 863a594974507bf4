"""One trial: the real stage, under one layout, for a few steps → the figures of its steps, or why there are none.

The process is the one that a refresh would start, told by its `config.json` that it is only measured: it saves nothing,
and works outside the store, where nothing can take its folder for an artifact or for a run to be resumed.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from flows.compare.record import TrialEntry
from flows.launch.stage_process import watch
from flows.ledger.events import now_ms
from flows.planning.devices import check_devices
from flows.planning.plan import Plan, PlannedStage
from flows.running.runner import Launcher
from flows.running.workspace import Foundation, stage_input
from flows.store.content import SCRATCH_FOLDER
from flows.store.store import Store
from stages.core.contract import Trial
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.core.files import write_atomically


@dataclass(frozen=True)
class Bench:
    """What all trials of a comparison share. `inputs`: stage name → folder of its artifact."""

    store: Store
    inputs: dict[str, Path]
    num_steps: int
    launch: Launcher
    stop: threading.Event


def run_trial(bench: Bench, planned: PlannedStage, layout: int, round_number: int, work: Path) -> TrialEntry:
    """Run a stage under its layout; what keeps it from running well is part of the entry.

    Raises RefreshStoppedError when it was told to stop.
    """
    _prepare(bench, planned, work)
    started_ms, started_s = now_ms(), time.monotonic()
    entry = TrialEntry(layout=layout, round=round_number, started_ms=started_ms, seconds=0.0)
    try:
        check_devices(Plan(planned.recipe, {planned.name: planned}))
        process = bench.launch(work, planned.config)
        result = watch(process, planned, work, lambda: None, bench.stop)
        found = {"steps": _steps(work), "metrics": result.metrics, "tags": result.tags}
    except RefreshStoppedError:
        raise
    except LifecycleError as error:
        found = {"error": str(error), "error_class": type(error).__name__}
    finally:
        shutil.rmtree(work / SCRATCH_FOLDER, ignore_errors=True)
    return entry.model_copy(update={**found, "seconds": time.monotonic() - started_s})


def _prepare(bench: Bench, planned: PlannedStage, work: Path) -> None:
    foundation = Foundation(inputs=bench.inputs, leases={}, upstream={})
    told = stage_input(bench.store, planned, foundation, Trial(steps=bench.num_steps))
    with bench.store.explained(f"prepare {work}"):
        work.mkdir(parents=True)
        write_atomically(work / "config.json", told.model_dump_json(indent=2))


def _steps(work: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
