"""Programs around a promote stage: before it, to fetch the champion from MLflow; after it, to register the candidate.

python -m flows.champion.promotion judge WORK               writes champion.json, then becomes the stage's process
python -m flows.champion.promotion complete ARTIFACT WORK   the hook: registers the candidate, moves the aliases

The stage itself does not use MLflow. Both programs run under the supervisor. The hook may run again: it completes what
a crash cut short and changes nothing else. Only the hook holds the lock of the registered model: nothing waits while
another candidate is judged, and a champion that changed meanwhile is noticed under the lock (`OutdatedVerdictError`).
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flows.champion import approvals
from flows.champion.evaluate_again import reevaluate_champion
from flows.champion.registrations import Registration, promotion_lock
from flows.champion.registry import CHAMPION, PREVIOUS, RegisteredVersion, Registry
from flows.ledger.home import store_root
from flows.ledger.record import final_result
from flows.store.record import Record, UpstreamEntry
from flows.store.shared import obtain
from flows.store.store import Store, read_artifact
from flows.tracking.cursor import run_id_of
from stages.__main__ import fail
from stages.core.approval import AWAITED, PROMOTED, VERDICT_TAG
from stages.core.contract import StageContext, StageInput, StageResult
from stages.core.errors import INTERNAL_ERROR, EvaluationError, LifecycleError, StoreError, full_disk_named
from stages.core.files import write_atomically
from stages.core.garbage import collect_rarely
from stages.core.process_tree import die_with_parent
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.paired import compare
from stages.kinds.promote.verdict import CHAMPION_FILE, VERDICT_FILE, Champion, ComparedChampion, Verdict


def main() -> None:
    """Run the step that the first argument names, in the work folder of the last; exit like a stage process."""
    die_with_parent()
    collect_rarely()
    steps: dict[str, Callable[..., None]] = {"judge": judge, "complete": complete}
    folders = [Path(argument) for argument in sys.argv[2:]]
    try:
        with full_disk_named("promoting", folders[-1]):
            steps[sys.argv[1]](*folders)
    except LifecycleError as error:
        fail(folders[-1], error, error.exit_code)
    except Exception as error:
        traceback.print_exc()
        fail(folders[-1], error, INTERNAL_ERROR)


def judge(work: Path) -> None:
    """Write the champion to compare with into the promote stage's work folder, then exec the stage's process.

    A champion that was evaluated differently from the candidate is evaluated first. Raises what `Registry` and that
    evaluation raise, StoreError for a missing artifact.
    """
    stage_input = StageInput.model_validate_json((work / "config.json").read_bytes())
    config = PromoteConfig.model_validate(stage_input.config)
    champion = Registry().find(config.name)
    standing = ComparedChampion(champion=_champion(champion, stage_input, config, work) if champion else None)
    write_atomically(work / CHAMPION_FILE, standing.model_dump_json(indent=2))
    os.execv(sys.executable, [sys.executable, "-m", "stages", str(work)])  # noqa: S606 (no shell)


def complete(artifact: Path, work: Path) -> None:
    """Register the candidate in MLflow, promoted or not; move the aliases if the promote stage promoted it.

    Where a person must approve that first, it only asks, and nothing changes. If the hook was cut short after the move
    and a rollback came since, the rollback stands. Raises what `Registry` raises, such as OutdatedVerdictError.
    """
    verdict = Verdict.model_validate_json((artifact / VERDICT_FILE).read_bytes())
    record = _record(artifact)
    candidate = _candidate(verdict.name, record)
    registry = Registry()
    with promotion_lock(candidate.name):
        approval = approvals.over(artifact)
        # Under the lock: the champion cannot change between this look and the move.
        succeeds = (
            verdict.outcome == PROMOTED
            and (approval is None or approval.decision != "rejected")
            and not registry.is_champion(candidate, verdict.champion_version)
            and not registry.was_rolled_back(candidate, record.attempt)
        )
        groups = registry.approvers(candidate.name) or approvals.asked_groups(artifact)
        if succeeds and groups:
            approval = approval or approvals.ask(artifact, groups)
        if approval:
            candidate = candidate.model_copy(update={"approval": approval.text})
            # Also of one that is late by now: only `over` makes that a rejection.
            if approval.decision is None:
                _write_result(work, {**approval.tags, VERDICT_TAG: AWAITED})
                return
        by = (verdict.champion_version, record.attempt) if succeeds else ()
        registered = registry.register(candidate, *by)
        if succeeds:
            registry.ask_for_approval(candidate.name, approvals.asked_groups(artifact))
            registry.promote(registered, verdict.champion_version)
            former = f", version {verdict.champion_version} is {PREVIOUS}" if verdict.champion_version else ""
            context = StageContext(work, record.stage, record.version, inputs={}, leases={}, cache=work)
            context.milestone(f"version {registered.number} of {candidate.name} is {CHAMPION}{former}")
    decided = approval.tags if approval else {}
    if groups:
        approvals.tell_refreshes(artifact, decided or {VERDICT_TAG: verdict.outcome})
    _write_result(work, {"registered_version": registered.number, **decided})


def _write_result(work: Path, tags: dict[str, str]) -> None:
    write_atomically(work / "result.json", StageResult(tags=tags).model_dump_json(indent=2))


def scores_of(store: Store, evaluations: Iterable[UpstreamEntry]) -> dict[str, float]:
    """Return the final metrics, without standard errors, of the model's evaluations that are in the store."""
    found = (store.find(entry.kind, entry.version) for entry in evaluations)
    metrics = {
        name: value for artifact in found if artifact for name, value in final_result(artifact.folder).metrics.items()
    }
    return {name: value for name, value in metrics.items() if not name.endswith("_stderr")}


def data_of(store: Store, model: UpstreamEntry) -> list[str]:
    """Return the datasets that a model and its ancestors were trained on, each as `STAGE: SOURCE`."""
    todo, seen, data = [model], set(), []
    while todo:
        entry = todo.pop()
        artifact = store.find(entry.kind, entry.version)
        # Several stages may share an ancestor.
        if artifact is None or entry.version in seen:
            continue
        seen.add(entry.version)
        if artifact.record.product == "dataset":
            data.append(f"{entry.stage}: {artifact.record.tags.get('source', entry.version)}")
        todo += artifact.record.upstream.values()
    return sorted(data)


def describe(promotion: Record, base: UpstreamEntry | None, scores: dict[str, float], data: Iterable[str]) -> str:
    """Return a registered version's description in Markdown for MLflow. base: the model that an adapter belongs to."""
    model = promotion.upstream["model"]
    beside = f", an adapter of `{base.stage}-{base.version}`" if base else ""
    scores_text = ", ".join(f"{name} {value:.4g}" for name, value in scores.items()) or "none"
    return "\n\n".join(
        [
            f"`{model.stage}-{model.version}` of the recipe `{promotion.recipe}`{beside}",
            f"**Scores**: {scores_text}",
            f"**Data**: {', '.join(data) or 'none of this store'}",
        ]
    )


def _champion(champion: RegisteredVersion, stage_input: StageInput, config: PromoteConfig, work: Path) -> Champion:
    same_model = champion.registration.digest == _record(stage_input.inputs[config.model]).digest
    needed = config.compares and not (same_model or config.baselines)
    folders: list[Path] = []
    if needed:
        evaluations = [stage_input.inputs[name] for name in config.evaluations]
        context = StageContext(work, stage_input.name, stage_input.version, {}, {}, stage_input.cache)
        folders = _comparable(champion, evaluations, context)
    return Champion(version=champion.number, same_model=same_model, evaluations=tuple(folders))


def _comparable(champion: RegisteredVersion, candidate: Sequence[Path], context: StageContext) -> list[Path]:
    """Return the champion's evaluations; repeat them if the candidate's settings differ, or the artifacts are gone."""
    store = Store(store_root())
    found = [obtain(store, *key.split("/")) for key in champion.registration.evaluations]
    folders = [artifact.folder for artifact in found if artifact]
    try:
        compare(candidate, folders)
    except EvaluationError as reason:
        context.milestone(f"the champion, version {champion.number}, is evaluated as the candidate was: {reason}")
        return reevaluate_champion(candidate, champion, context)
    return folders


def _candidate(name: str, promotion: Record) -> Registration:
    """Return the registration to send to MLflow for the candidate, from the record of the promote stage's artifact."""
    upstream = promotion.upstream
    model, server = upstream["model"], upstream.get("server")
    store = Store(store_root())
    built = store.find(model.kind, model.version)
    base = store.index().base_of(built.record) if built else None
    evaluations = [entry for field, entry in upstream.items() if field.startswith("evaluations.")]
    scores, data = scores_of(store, evaluations), data_of(store, model)
    return Registration(
        name=name,
        model=_key(model),
        digest=model.digest,
        evaluations=tuple(map(_key, evaluations)),
        base=_key(base) if base else None,
        server=_key(server) if server else None,
        mlflow_run_id=(run_id_of(built.record.attempt) or built.record.mlflow_run_id) if built else None,
        description=describe(promotion, base, scores, data),
        scores=scores,
        data=tuple(data),
    )


def _record(folder: Path) -> Record:
    artifact = read_artifact(folder)
    if artifact is None:
        raise StoreError(f"{folder} is no artifact any more; run again")
    return artifact.record


def _key(entry: UpstreamEntry) -> str:
    return f"{entry.kind}/{entry.version}"


if __name__ == "__main__":
    main()
