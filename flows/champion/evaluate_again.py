"""Repeated evaluation of a champion under the candidate's settings, when a task, a prompt or a limit has changed.

Input: the candidate's evaluations, and the champion's model in the store. Output: evaluate artifacts of the champion,
built now or found; the next candidate with the same evaluations finds them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.champion.champions import artifact_of, base_of
from flows.champion.registry import CHAMPION, RegisteredVersion
from flows.ledger.home import home, store_root
from flows.ledger.machine import num_slots
from flows.planning.devices import on_devices, wanted_slots
from flows.planning.plan import PlannedStage
from flows.recipe.version import identity_of, resume_key_of, version_of
from flows.running.runner import Attempt, AttemptEnd, BuiltStage, run_stage
from flows.running.slots import Slots
from flows.store.record import Artifact
from flows.store.store import Store
from stages.core.contract import StageContext, StageInput
from stages.kinds.evaluate.config import EvaluateConfig
from stages.serving.engine import LAUNCH_FILE, LaunchSpec

BASE = "base"
"""Input name of the base model in the champion's repeated evaluation, when the champion is an adapter."""


def reevaluate_champion(candidate: Sequence[Path], champion: RegisteredVersion, context: StageContext) -> list[Path]:
    """Evaluate the champion as the candidate was evaluated, in this machine's slots; return the new artifacts.

    Raises StoreError when the champion's model is not in the store, and what an evaluate stage raises.
    """
    model, base = artifact_of(champion, champion.registration.model), base_of(champion)
    upstream = {CHAMPION: _built(CHAMPION, model)} | ({BASE: _built(BASE, base)} if base else {})
    planned = [_planned(folder, upstream, recipe=champion.name) for folder in candidate]
    return [_evaluate(one, upstream, context) for one in planned]


def _built(name: str, artifact: Artifact) -> BuiltStage:
    record = artifact.record
    return BuiltStage(name, record.kind, record.version, "cached", 0.0, artifact.folder, record)


def _planned(candidate: Path, upstream: Mapping[str, BuiltStage], recipe: str) -> PlannedStage:
    """Return the candidate's evaluate stage with the champion as its model. upstream: the champion, and its base."""
    asked = StageInput.model_validate_json((candidate / "config.json").read_bytes())
    config = EvaluateConfig.model_validate(asked.config)
    launch = asked.inputs[config.model] / LAUNCH_FILE
    # A candidate behind a serve stage was asked under that stage's server options.
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


def _evaluate(planned: PlannedStage, upstream: Mapping[str, BuiltStage], context: StageContext) -> Path:
    slots = Slots(home() / "slots", num_slots())
    held = slots.acquire(wanted_slots(planned.config, slots.count), lambda: None)
    try:
        planned = on_devices(planned, held.numbers)
        return run_stage(planned, upstream, Store(store_root()), _Reporter(context)).artifact
    finally:
        held.release()


class _Reporter:
    """Observer of the champion's repeated evaluation, which prints its progress in the promote stage's log."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._has_reported_wait = False

    def waiting(self) -> None:
        if not self._has_reported_wait:
            self._context.milestone("another refresh is evaluating the champion")
        self._has_reported_wait = True

    def started(self, attempt: Attempt) -> None:
        self._context.milestone(f"evaluating the champion; its log is {attempt.work / 'log.txt'}")

    def tick(self) -> None:
        pass

    def ended(self, outcome: AttemptEnd) -> None:
        if outcome.result:
            self._context.milestone(f"evaluated the champion in {outcome.seconds:.0f} s: {outcome.folder.name}")
