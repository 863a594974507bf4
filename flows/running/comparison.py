"""Comparison of layouts: instead of building a stage, a refresh runs some of its training steps under each layout.

Layouts take turns, every other round in reverse order, so that temporary or growing slowness of the machine affects all
equally. A trial is the process that a refresh would start; its `config.json` says that it is only measured. It saves
nothing, and works outside the store, where its folder cannot be taken for an artifact or for resumable work.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.launch.stage_process import watch
from flows.ledger.events import CompareBegan, LayoutMeasured, TrialEnded
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import NOTE_FILE, ROWS_FILE, ledger_of
from flows.planning.devices import check_devices, on_devices, wanted_slots
from flows.planning.plan import Plan, PlannedStage
from flows.report.layouts import as_markdown, comparison_as_json, rows_of
from flows.report.page import write_report
from flows.running.runner import Launcher
from flows.running.workspace import ResolvedInputs, stage_input
from flows.store.content import SCRATCH_FOLDER
from flows.store.store import Store
from stages.core.contract import Trial
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.core.files import write_atomically


@dataclass(frozen=True)
class LayoutComparison:
    """Layout comparison to run: how it measures, and the stage as planned under each layout that can work."""

    began: CompareBegan
    layouts: tuple[PlannedStage, ...]

    def is_unfinished(self, record: RefreshRecord) -> bool:
        """Return whether a layout lacks a trial in some round; layouts with a failed trial count as done."""
        trials = [record.trials_of(number) for number in range(len(self.layouts))]
        rounds = self.began.num_rounds
        return any(len(ended) < rounds and not any(trial.error for trial in ended) for ended in trials)


@dataclass(frozen=True)
class TrialResources:
    """Resources that all trial runs of a layout comparison share. inputs: artifact folders by stage name."""

    store: Store
    inputs: Mapping[str, Path]
    launch: Launcher
    stop: threading.Event


def turns(num_layouts: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """Yield (round, layout) in the order of a comparison's trial runs: layouts 1 2 3, then 3 2 1, then 1 2 3, …"""
    for round_number in range(1, num_rounds + 1):
        order = range(num_layouts)
        yield from ((round_number, layout) for layout in (order if round_number % 2 else reversed(order)))


def run_trial(
    bench: TrialResources,
    comparison: LayoutComparison,
    layout: int,
    round_number: int,
    devices: Sequence[int],
    work: Path,
) -> TrialEnded:
    """Run some training steps under one layout; return measurements or error; raise RefreshStoppedError if stopped."""
    planned = comparison.layouts[layout]
    # The whole machine is held, and a layout may use a part of it.
    planned = on_devices(planned, devices[: wanted_slots(planned.config, len(devices))])
    steps = comparison.began.num_warmup_steps + comparison.began.num_steps
    resolved_inputs = ResolvedInputs(inputs=dict(bench.inputs), leases={}, upstream={})
    with bench.store.explained(f"prepare {work}"):
        work.mkdir(parents=True)
        config = stage_input(bench.store, planned, resolved_inputs, Trial(steps=steps))
        write_atomically(work / "config.json", config.model_dump_json(indent=2))
    started_s = time.monotonic()
    try:
        check_devices(Plan(planned.recipe, {planned.name: planned}))
        result = watch(bench.launch(work, planned.config), planned, work, lambda: None, bench.stop)
        outcome: dict[str, Any] = {"metrics": result.metrics, "tags": result.tags}
    except RefreshStoppedError:
        raise
    except LifecycleError as error:
        outcome = {"error": str(error), "error_class": type(error).__name__}
    finally:
        shutil.rmtree(work / SCRATCH_FOLDER, ignore_errors=True)
    seconds = time.monotonic() - started_s
    return TrialEnded(layout=layout, round=round_number, work=work, seconds=seconds, **outcome)


def conclude(record: RefreshRecord, store: Store) -> list[LayoutMeasured]:
    """Write the reports (HTML, JSON, Markdown) of a finished layout comparison; return the results of each layout."""
    write_report(record, store.index())
    rows, folder = rows_of(record), ledger_of(record.refresh).folder
    (folder / ROWS_FILE).write_text(json.dumps(comparison_as_json(record, rows), indent=2))
    (folder / NOTE_FILE).write_text(as_markdown(rows), encoding="utf-8")
    return [LayoutMeasured(layout=n, metrics=dict(row.metrics), error=row.error) for n, row in enumerate(rows)]
