"""A promotion: who is champion → the promote stage, which judges → the registry, which follows the verdict.

    python -m flows.champion.promotion WORK_FOLDER

Takes the place of the stage process, under the same supervisor; the stage itself, which knows no MLflow, is a child.
The artifact is committed only after this ends well, so that a promotion which a crash, or an absent MLflow, cut short
is judged again, against whoever is champion then.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from flows.champion.registrations import Registration, only_one
from flows.champion.registry import CHAMPION, PREVIOUS, RegisteredVersion, Registry
from flows.ledger.home import store_root
from flows.store.record import Record
from flows.store.store import Store, read_artifact
from flows.tracking.cursor import run_id_of
from stages.__main__ import fail
from stages.core.contract import StageContext, StageInput, StageResult
from stages.core.errors import INTERNAL_ERROR, LifecycleError, StoreError
from stages.core.files import write_atomically
from stages.core.supervisor import die_with_parent
from stages.promote.config import PromoteConfig
from stages.promote.verdict import CHAMPION_FILE, VERDICT_FILE, Champion, Standing, Verdict

RESULT_FILE = "result.json"


def main() -> None:
    """Run the promotion whose work folder is the only argument; exits like a stage process."""
    die_with_parent()
    work = Path(sys.argv[1])
    try:
        sys.exit(promote(work))
    except LifecycleError as error:
        _fail(work, error, error.exit_code)
    except Exception as error:
        traceback.print_exc()
        _fail(work, error, INTERNAL_ERROR)


def promote(work: Path) -> int:
    """Returns the exit code of the stage process. Raises what `Registry` raises, StoreError for a missing artifact."""
    told = StageInput.model_validate_json((work / "config.json").read_bytes())
    config = PromoteConfig.model_validate(told.config)
    candidate = _candidate(config, told)
    registry = Registry()
    with only_one(config.name):
        champion = registry.find(config.name)
        standing = Standing(champion=_champion(champion, candidate, config) if champion else None)
        write_atomically(work / CHAMPION_FILE, standing.model_dump_json(indent=2))
        stage = subprocess.run([sys.executable, "-m", "stages", str(work)], check=False)
        if stage.returncode == 0:
            _follow_verdict(work, told, registry, candidate, champion)
    return stage.returncode


def _candidate(config: PromoteConfig, told: StageInput) -> Registration:
    record = _record(told.inputs[config.model])
    return Registration(
        name=config.name,
        model=_key(record),
        digest=record.digest,
        evaluations=tuple(_key(_record(told.inputs[stage])) for stage in config.evaluations),
        server=_key(_record(told.inputs[config.server])) if config.server else None,
        mlflow_run_id=run_id_of(record.attempt),
    )


def _champion(champion: RegisteredVersion, candidate: Registration, config: PromoteConfig) -> Champion:
    same_model = champion.registration.digest == candidate.digest
    needed = not (same_model or config.baselines or config.gates.max_regression_standard_errors is None)
    evaluations = champion.registration.evaluations if needed else ()
    folders = _find_evaluations(evaluations, f"version {champion.number} of {champion.name}, its champion,")
    return Champion(version=champion.number, same_model=same_model, evaluations=tuple(folders))


def _find_evaluations(keys: Sequence[str], whose: str) -> list[Path]:
    store = Store(store_root())
    found = {key: store.find(*key.split("/")) for key in keys}
    if missing := [key for key, artifact in found.items() if artifact is None]:
        raise StoreError(
            f"{whose} was evaluated as {', '.join(missing)}, which is not in {store.root}; name evaluations to compare "
            "with as `baselines`, or set gates.max_regression_standard_errors to null for once"
        )
    return [artifact.folder for artifact in found.values() if artifact]


def _follow_verdict(
    work: Path, told: StageInput, registry: Registry, candidate: Registration, champion: RegisteredVersion | None
) -> None:
    """Register the candidate, whatever the verdict; move the alias if it is for it."""
    verdict = Verdict.model_validate_json((work / VERDICT_FILE).read_bytes())
    number = champion.number if champion else None
    succeeds = verdict.outcome == "promoted"
    registered = registry.register(candidate, number if succeeds else None)
    if succeeds:
        registry.promote(registered, number)
        _say(work, told, f"version {registered.number} of {candidate.name} is {CHAMPION}{_former(number)}")
    result = StageResult.model_validate_json((work / RESULT_FILE).read_bytes())
    tags = {**result.tags, "registered_version": registered.number}
    write_atomically(work / RESULT_FILE, result.model_copy(update={"tags": tags}).model_dump_json(indent=2))


def _former(number: str | None) -> str:
    return f", version {number} is {PREVIOUS}" if number else ""


def _say(work: Path, told: StageInput, message: str) -> None:
    StageContext(work, told.name, told.version, told.inputs, told.leases, told.cache).milestone(message)


def _record(folder: Path) -> Record:
    artifact = read_artifact(folder)
    if artifact is None:
        raise StoreError(f"{folder} is no artifact any more; run again")
    return artifact.record


def _key(record: Record) -> str:
    return f"{record.kind}/{record.version}"


def _fail(work: Path, error: Exception, exit_code: int) -> None:
    """Leave the error; a result that the registry did not follow is none."""
    (work / RESULT_FILE).unlink(missing_ok=True)
    fail(work, error, exit_code)


if __name__ == "__main__":
    main()
