"""A comparison while it runs: its plan, its record, its rounds. Knows no Prefect and no MLflow.

Layouts take turns, every other round in reverse order: what slows the machine down for a while, or more and more, hits
all of them alike. Nothing else of this home runs meanwhile: a comparison holds every slot of the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flows.compare.figures import first_line
from flows.compare.layouts import BATCH_FIELD, RefusedLayout, read_layouts, text_of
from flows.compare.record import ComparisonFolder, ComparisonRecord, ComparisonState, LayoutEntry, comparison_folder
from flows.compare.trial import Bench, run_trial
from flows.launch import choice
from flows.ledger.events import now_ms
from flows.ledger.home import home, store_root
from flows.ledger.machine import hardware, num_slots
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.provenance import git_commit
from flows.ledger.refreshes import new_refresh_id
from flows.planning.devices import on_devices, wanted_slots
from flows.planning.layout_choice import choose_layouts
from flows.planning.outside import resolve_outside
from flows.planning.plan import Plan, PlannedStage, chosen_stages, plan
from flows.recipe.recipe import load_recipe
from flows.recipe.version import identity_of, resume_key_of, version_of
from flows.running.refresh_run import PlannedRefresh, RefreshRequest, RefreshRun
from flows.running.runner import Launcher
from flows.running.slots import Slots
from flows.running.stage_observer import describe
from flows.store.store import Store
from flows.tracking.labels import params_of, tags_of
from stages.core.errors import RecipeError, RefreshStoppedError, StoreError
from stages.train.config import TrainConfig

SHOWN_CHARACTERS = 120
"""Of a reason, while a comparison runs; its end shows more."""


@dataclass(frozen=True)
class ComparisonRequest:
    """What a person asks for; JSON-able, so that it can be the parameters of a Prefect deployment."""

    recipe: str
    stage: str
    layouts: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    num_steps: int = 20
    num_warmup_steps: int = 5
    num_rounds: int = 2


@dataclass(frozen=True)
class PlannedComparison:
    """A request, and what it comes to: the upstream stages as planned, and the stage under each layout."""

    request: ComparisonRequest
    upstream: Plan
    layouts: tuple[PlannedStage, ...]
    texts: tuple[str, ...]
    refused: tuple[RefusedLayout, ...]
    store: Store

    @property
    def upstream_refresh(self) -> PlannedRefresh | None:
        """The refresh that builds what is not there yet; None when all of it is."""
        if all(stage.action == "cached" for stage in self.upstream.stages.values()):
            return None
        request = RefreshRequest(self.request.recipe, self.request.overrides)
        return PlannedRefresh(request, self.upstream, self.store)


def plan_comparison(request: ComparisonRequest) -> PlannedComparison:
    """Raises what `load_recipe`, `resolve_outside` and `plan` raise, and RecipeError that lists every bad layout."""
    recipe = load_recipe(Path(request.recipe), request.overrides)
    chosen = chosen_stages(recipe, request.stage)
    stage = recipe.stages[request.stage]
    if not isinstance(stage, TrainConfig):
        raise RecipeError(f"comparing layouts of {request.stage}: it is a {stage.kind} stage, expected a train stage")
    configs, refused = read_layouts(request.layouts, stage)
    store = Store(store_root())
    outside = resolve_outside(recipe, chosen)
    index = store.index()
    recipe, _ = choose_layouts(recipe, outside, index)
    planned = plan(recipe, outside, index, until=request.stage).stages
    measured = planned.pop(request.stage)
    layouts = tuple(_under_layout(measured, config, planned) for config in configs)
    texts = tuple(text_of(config, stage.global_batch_size) for config in configs)
    return PlannedComparison(request, Plan(recipe.name, planned), layouts, texts, tuple(refused), store)


class ComparisonRun:
    """A comparison as planned. Its record is written after every trial."""

    upstream: RefreshRun | None = None
    """The refresh that builds what the stage stands on, when it was begun already."""

    def __init__(self, planned: PlannedComparison, comparison: str | None = None, launch: Launcher = choice.start):
        """Begin the record; default of its name: a new one."""
        self.planned = planned
        self.stop = threading.Event()
        self.record = _new_record(planned, comparison or new_refresh_id(f"{planned.upstream.recipe}-compare"))
        self.folder: ComparisonFolder = comparison_folder(self.record.comparison)
        self._launch = launch
        self._say: Callable[[str], None] = lambda _: None
        self._started_s = time.monotonic()
        self.folder.write(self.record)

    def listen(self, say: Callable[[str], None]) -> None:
        """Have every trial told as it ends."""
        self._say = say

    def begin(self, prefect_flow_run_id: str) -> None:
        """Note which Prefect flow run this is."""
        self._update(prefect_flow_run_id=prefect_flow_run_id)

    def run(self, measure: Callable[[Callable[[], None], str], None]) -> None:
        """Run all rounds, on artifacts that are there. A layout that failed is not tried again.

        measure: calls a trial, which has a name.
        Raises RefreshStoppedError when `stop` is set.
        """
        bench = self._bench()
        slots = Slots(home() / "slots", num_slots())
        held = slots.acquire(slots.count, self._wait_for_slots)
        try:
            for round_number, layout in turns(len(self.planned.layouts), self.planned.request.num_rounds):
                if not any(trial.error for trial in self.record.trials_of(layout)):
                    trial = partial(self._try, bench, layout, round_number, held.numbers)
                    measure(trial, f"round {round_number}: {self.planned.texts[layout]}")
        finally:
            held.release()

    def finish(self, error: BaseException | None) -> ComparisonRecord:
        """Settle the state; a comparison of which no layout could be measured has failed."""
        state: ComparisonState = "completed"
        reason = describe(error) if error else None
        if error:
            state = "cancelled" if isinstance(error, RefreshStoppedError | KeyboardInterrupt) else "failed"
        elif all(trial.error for trial in self.record.trials):
            state, reason = "failed", "no layout could be measured"
        self._update(state=state, error=reason, seconds=round(time.monotonic() - self._started_s, 2))
        return self.record

    def _bench(self) -> Bench:
        store, request = self.planned.store, self.planned.request
        inputs = {name: _folder_of(store, stage) for name, stage in self.planned.upstream.stages.items()}
        num_steps = request.num_warmup_steps + request.num_steps
        return Bench(store, inputs, num_steps, self._launch, self.stop)

    def _try(self, bench: Bench, layout: int, round_number: int, devices: Sequence[int]) -> None:
        planned = self.planned.layouts[layout]
        work = self.folder.work_folder(layout, round_number)
        placed = on_devices(planned, devices[: wanted_slots(planned.config, len(devices))])
        trial = run_trial(bench, placed, layout, round_number, work)
        self._update(trials=(*self.record.trials, trial))
        text = f"round {round_number}: {self.planned.texts[layout]}"
        outcome = "failed" if trial.error else "measured"
        self._say(
            f"{text}: {outcome} in {trial.seconds:.1f} s  {first_line(trial.error or '', SHOWN_CHARACTERS)}".rstrip()
        )

    def _wait_for_slots(self) -> None:
        if self.stop.is_set():
            raise RefreshStoppedError("the comparison was waiting for the machine to be free when it was stopped")

    def _update(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        self.folder.write(self.record)


def turns(num_layouts: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """(round, layout) in the order of trials: 1 2 3, 3 2 1, 1 2 3, …"""
    for round_number in range(1, num_rounds + 1):
        order = range(num_layouts)
        yield from ((round_number, layout) for layout in (order if round_number % 2 else reversed(order)))


def _under_layout(planned: PlannedStage, config: TrainConfig, upstream: dict[str, PlannedStage]) -> PlannedStage:
    """The stage as a refresh would plan it with this layout."""
    versions = {name: upstream[name].version for name in planned.upstream}
    outside = planned.identity["outside"]
    assert isinstance(outside, dict)
    identity = identity_of(config, versions, outside)
    return replace(
        planned,
        config=config,
        identity=identity,
        version=version_of(identity),
        resume_key=resume_key_of(config, versions, outside),
        action="run",
    )


def _folder_of(store: Store, planned: PlannedStage) -> Path:
    artifact = store.find(planned.kind, planned.version)
    if artifact is None or artifact.damage:
        raise StoreError(f"comparing layouts: the artifact of {planned.name} is not there, or damaged; run it again")
    store.note_use(artifact)
    return artifact.folder


def _new_record(planned: PlannedComparison, comparison: str) -> ComparisonRecord:
    request = planned.request
    return ComparisonRecord(
        comparison=comparison,
        recipe=planned.upstream.recipe,
        recipe_path=Path(request.recipe).absolute(),
        overrides=request.overrides,
        stage=request.stage,
        num_steps=request.num_steps,
        num_warmup_steps=request.num_warmup_steps,
        num_rounds=request.num_rounds,
        started_ms=now_ms(),
        process=ProcessIdentity.own(),
        hardware=hardware(),
        git_commit=git_commit(),
        layouts=(
            *(_entry(text, stage) for text, stage in zip(planned.texts, planned.layouts, strict=True)),
            *(_refused_entry(refused, planned.layouts[0]) for refused in planned.refused),
        ),
    )


def _entry(text: str, planned: PlannedStage) -> LayoutEntry:
    config = planned.config
    assert isinstance(config, TrainConfig)
    return LayoutEntry(
        text=text,
        engine=config.engine,
        num_devices=config.layout.world_size,
        global_batch_size=config.global_batch_size,
        params=params_of(planned),
        tags=tags_of(planned),
    )


def _refused_entry(refused: RefusedLayout, like: PlannedStage) -> LayoutEntry:
    """What its run would have had, but for a version."""
    fields = {f"layout.{name}": str(value) for name, value in refused.layout.model_dump(mode="json").items()}
    said = {"engine": refused.engine, BATCH_FIELD: str(refused.global_batch_size)}
    tags = {name: value for name, value in tags_of(like).items() if name != "version"}
    return LayoutEntry(
        text=refused.text,
        engine=refused.engine,
        num_devices=refused.layout.world_size,
        global_batch_size=refused.global_batch_size,
        params={**params_of(like), **said, **fields},
        tags={**tags, "engine": refused.engine, "layout": refused.text},
        refused=refused.reason,
    )
