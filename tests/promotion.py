"""Helpers that put candidates for promotion into a store without training or serving them."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from flows.planning.plan import PlannedStage, plan
from flows.recipe.recipe import load_stages
from flows.running.runner import BuiltStage, run_stage
from flows.store.content import content_digest, hash_files
from flows.store.record import Record, UpstreamEntry
from flows.store.store import Store
from stages.core.contract import StageInput
from tests.candidates import write_adapter, write_evaluation, write_model
from tests.faults.tiny import Notes

ROOT = Path(__file__).parents[1]
NAME = "adder"


def write_question(folder: Path, planned: PlannedStage, upstream: Mapping[str, BuiltStage]) -> None:
    """Write the `config.json` of an evaluation, which names the evaluated model and its tasks."""
    inputs = {name: upstream[name].artifact for name in planned.ancestors}
    stage_input = StageInput(
        name=planned.name,
        kind=planned.kind,
        version=planned.version,
        config=planned.config.model_dump(mode="json"),
        inputs=inputs,
        outside=planned.identity["outside"],
        cache=folder,
    )
    (folder / "config.json").write_text(stage_input.model_dump_json())


def candidate_tree(mark: str, approval: Mapping[str, Any] | None = None, **gates: Any) -> dict[str, Any]:
    """Return a recipe that evaluates and then promotes a model. Each `mark` gives a different model."""
    promotion = {"kind": "promote", "name": NAME, "model": "model", "evaluations": ["scores"], "gates": gates}
    return {
        "model": {"kind": "download", "model": "builtin/qwen3-1m", "files": [mark]},
        "scores": {"kind": "evaluate", "model": "model", "tasks": ["sums"]},
        "promote": promotion | ({"approval": dict(approval)} if approval else {}),
    }


def adapter_tree(mark: str, base: str, **gates: Any) -> dict[str, Any]:
    """Return a recipe that promotes an adapter (one for each `mark`) of a base model (`base`) after an evaluation."""
    return {
        "base": {"kind": "download", "model": "builtin/qwen3-1m", "files": [base]},
        "rows": {"kind": "download", "dataset": "builtin/addition"},
        "tuned": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "adapter": {"exclude_modules": [mark]},
            "data": {"dataset": "rows"},
            "global_batch_size": 8,
            "learning_rate": 1e-3,
        },
        "scores": {"kind": "evaluate", "model": "tuned", "tasks": ["sums"]},
        "promote": {"kind": "promote", "name": NAME, "model": "tuned", "evaluations": ["scores"], "gates": gates},
    }


def planned_stages(store: Store, tree: Mapping[str, Any]) -> dict[str, PlannedStage]:
    recipe = load_stages("tiny", Path("/"), tree)
    return plan(recipe, {name: {} for name in recipe.stages}, store.index()).stages


def commit(
    store: Store, planned: PlannedStage, upstream: Mapping[str, BuiltStage], write: Callable[[Path], None]
) -> BuiltStage:
    """Store a stage's artifact, whose files the function `write` makes, unless the artifact exists already."""
    if not store.find(planned.kind, planned.version):
        work = store.make_folder(store.work_folder(planned.kind, planned.name, planned.resume_key))
        write(work)
        store.commit(work, _record(planned, upstream, work))
    found = store.find(planned.kind, planned.version)
    assert found
    return BuiltStage(planned.name, planned.kind, planned.version, "cached", 0.0, found.folder, found.record)


def offer(
    store: Store, mark: str, answers: Sequence[float], **gates: Any
) -> tuple[PlannedStage, dict[str, BuiltStage]]:
    """Store a candidate with the given score of each question, and return its promotion's plan and inputs."""
    stages = planned_stages(store, candidate_tree(mark, **gates))
    built = {"model": commit(store, stages["model"], {}, lambda work: write_model(work, mark))}
    built["scores"] = commit(store, stages["scores"], built, lambda work: write_evaluation(work, answers))
    return stages["promote"], built


def promote(store: Store, mark: str, answers: Sequence[float], **gates: Any) -> BuiltStage:
    """Store a candidate that was evaluated with the given score of each question, and run its promotion."""
    planned, upstream = offer(store, mark, answers, **gates)
    return run_stage(planned, upstream, store, Notes())


def offer_adapter(
    store: Store, mark: str, answers: Sequence[float], base: str = "base", **gates: Any
) -> tuple[PlannedStage, dict[str, BuiltStage]]:
    """Store an adapter with the given score of each question, and return its promotion's plan and inputs."""
    stages = planned_stages(store, adapter_tree(mark, base, **gates))
    built = {"base": commit(store, stages["base"], {}, lambda work: write_model(work, base))}
    built["rows"] = commit(store, stages["rows"], {}, lambda work: (work / "data").mkdir())
    built["tuned"] = commit(store, stages["tuned"], built, lambda work: write_adapter(work, f"{mark} of {base}"))
    built["scores"] = commit(store, stages["scores"], built, lambda work: write_evaluation(work, answers))
    return stages["promote"], built


def promote_adapter(store: Store, mark: str, answers: Sequence[float], base: str = "base", **gates: Any) -> BuiltStage:
    """Store an adapter that was evaluated with the given score of each question, and run its promotion."""
    planned, upstream = offer_adapter(store, mark, answers, base, **gates)
    return run_stage(planned, upstream, store, Notes())


def own_mlflow(folder: Path) -> dict[str, str]:
    """Make an MLflow database without a server; return the environment variables that make programs use it."""
    from mlflow import MlflowClient

    from flows.tracking.shipper import EXPERIMENT

    uri = f"sqlite:///{folder}/mlflow.db"
    (folder / "mlflow.db").write_bytes(_new_database())
    MlflowClient(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return {"MLFLOW_TRACKING_URI": uri, "LIFECYCLE_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


@cache
def _new_database() -> bytes:
    """Return the bytes of an empty MLflow database; cached, since creating one takes seconds."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return (Path(folder) / "mlflow.db").read_bytes()


def _record(planned: PlannedStage, upstream: Mapping[str, BuiltStage], work: Path) -> Record:
    files = hash_files(work)
    now = datetime.now(UTC)
    references = {field: upstream[stage].record for field, stage in planned.config.references().items()}
    return Record(
        recipe=planned.recipe,
        stage=planned.name,
        kind=planned.kind,
        product=planned.config.product,
        version=planned.version,
        identity=planned.identity,
        upstream={
            field: UpstreamEntry(stage=one.stage, kind=one.kind, version=one.version, digest=one.digest)
            for field, one in references.items()
        },
        digest=content_digest(planned.config.product, files),
        files=files,
        tags={},
        started=now,
        finished=now,
        seconds=1.0,
        packages={},
        git_commit=None,
    )
