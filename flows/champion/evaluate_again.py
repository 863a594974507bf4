"""Evaluates a champion as its challenger was, when the two were not asked the same: a task, a prompt, a limit changed.

In: the candidate's evaluations, and the champion's model in the store. Out: evaluate artifacts of the champion, built
now or found: the next candidate that is asked the same finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.champion.champions import artifact_of, base_of
from flows.champion.registry import CHAMPION, RegisteredVersion
from flows.ledger.home import home, store_root
from flows.ledger.machine import num_slots
from flows.planning.devices import on_devices, wanted_slots
from flows.planning.plan import PlannedStage
from flows.recipe.version import identity_of, resume_key_of, version_of
from flows.running.runner import Attempt, Built, Outcome, run_stage
from flows.running.slots import Slots
from flows.store.record import Artifact
from flows.store.store import Store
from stages.core.contract import StageContext, StageInput
from stages.kinds.evaluate.config import EvaluateConfig
from stages.serving.engine import LAUNCH_FILE, LaunchSpec

BASE = "base"
"""Name of the model that an adapter belongs to, among what its evaluation stands on."""


def evaluate_alike(candidate: Sequence[Path], champion: RegisteredVersion, context: StageContext) -> list[Path]:
    """Artifacts of the champion, asked as the `candidate` evaluations were. Holds slots of this machine meanwhile.

    Raises StoreError when the champion's model is not in the store, and what an evaluate stage raises.
    """
    model, base = artifact_of(champion, champion.registration.model), base_of(champion)
    upstream = {CHAMPION: _built(CHAMPION, model)} | ({BASE: _built(BASE, base)} if base else {})
    planned = [_planned(folder, upstream, recipe=champion.name) for folder in candidate]
    return [_evaluate(one, upstream, context) for one in planned]


def _built(name: str, artifact: Artifact) -> Built:
    record = artifact.record
    return Built(name, record.kind, record.version, "cached", 0.0, artifact.folder, record)


def _planned(candidate: Path, upstream: Mapping[str, Built], recipe: str) -> PlannedStage:
    """The candidate's evaluation, with the champion's model in its place, served as the candidate is.

    upstream: the champion; of an adapter, also its base.
    """
    asked = StageInput.model_validate_json((candidate / "config.json").read_bytes())
    config = EvaluateConfig.model_validate(asked.config)
    launch = asked.inputs[config.model] / LAUNCH_FILE
    serving = LaunchSpec.model_validate_json(launch.read_bytes()).serving if launch.is_file() else config.serving
    base = BASE if BASE in upstream else None
    config = config.model_copy(update={"model": CHAMPION, "adapter": None, "base": base, "serving": serving})
    versions = {name: built.version for name, built in upstream.items()}
    identity = identity_of(config, versions, asked.outside)
    return PlannedStage(
        recipe=recipe,
        name=f"{asked.name}-{CHAMPION}",
        kind=config.kind,
        version=version_of(identity),
        resume_key=resume_key_of(config, versions, asked.outside),
        identity=identity,
        config=config,
        upstream=tuple(upstream),
        ancestors=tuple(upstream),
        action="run",
        reason="the candidate was asked something else",
    )


def _evaluate(planned: PlannedStage, upstream: Mapping[str, Built], context: StageContext) -> Path:
    slots = Slots(home() / "slots", num_slots())
    held = slots.acquire(wanted_slots(planned.config, slots.count), lambda: None)
    try:
        planned = on_devices(planned, held.numbers)
        return run_stage(planned, upstream, Store(store_root()), _Teller(context)).artifact
    finally:
        held.release()


class _Teller:
    """Tells of the evaluation what belongs among the events of the promotion."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._has_said_that_it_waits = False

    def waiting(self) -> None:
        if not self._has_said_that_it_waits:
            self._context.milestone("another refresh is evaluating the champion")
        self._has_said_that_it_waits = True

    def started(self, attempt: Attempt) -> None:
        self._context.milestone(f"evaluating the champion; its log is {attempt.work / 'log.txt'}")

    def tick(self) -> None:
        pass

    def ended(self, outcome: Outcome) -> None:
        if outcome.result:
            self._context.milestone(f"evaluated the champion in {outcome.seconds:.0f} s: {outcome.folder.name}")
