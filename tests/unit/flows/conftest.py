"""Fixtures with tiny recipes, and with fake artifacts that are stored without running any stage."""

import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.planning.plan import Plan, PlannedStage, plan
from flows.recipe.recipe import Recipe, load_stages
from flows.store.content import content_digest, hash_files
from flows.store.record import Artifact, Record, UpstreamEntry
from flows.store.store import Store

TREE = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "problems": {"kind": "download", "dataset": "builtin/addition"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "problems"},
        "global_batch_size": 8,
        "learning_rate": 1e-5,
    },
    "awq": {"kind": "quantize", "model": "sft", "method": "awq", "calibration": {"dataset": "problems"}},
}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Recipe]:
    """Provide a function that makes a recipe of four stages; keyword arguments change fields of a stage."""

    def make(**changes: Mapping[str, object]) -> Recipe:
        return load_stages("small", tmp_path, {name: {**tree, **changes.get(name, {})} for name, tree in TREE.items()})

    return make


@pytest.fixture
def make_plan(store) -> Callable[..., Plan]:
    """Provide a function that plans a recipe against the store, as if no stage had inputs outside the store."""

    def make(recipe: Recipe, **options) -> Plan:
        return plan(recipe, {name: {} for name in recipe.stages}, store.index(), **options)

    return make


def commit_stage(store: Store, planned: PlannedStage, references: Mapping[str, Artifact], content: str) -> Artifact:
    """Store a fake artifact of a planned stage, made from the given input artifacts (by config field)."""
    work = store.make_folder(store.work_folder(planned.kind, planned.name, planned.resume_key))
    folder = work / ("model" if planned.config.product == "model" else "data")
    folder.mkdir()
    (folder / "content").write_text(content)
    files = hash_files(work)
    now = datetime.now(UTC)
    record = Record(
        recipe=planned.recipe,
        stage=planned.name,
        kind=planned.kind,
        product=planned.config.product,
        version=planned.version,
        identity=planned.identity,
        upstream={
            field: UpstreamEntry(
                stage=one.record.stage, kind=one.record.kind, version=one.record.version, digest=one.record.digest
            )
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
    return store.commit(work, record)


@pytest.fixture
def build(store) -> Callable[..., dict[str, Artifact]]:
    """Provide a function that stores fake artifacts, with contents by stage, for a plan's uncached stages."""

    def build(plan: Plan, **contents: str) -> dict[str, Artifact]:
        artifacts: dict[str, Artifact] = {}
        for planned in plan.stages.values():
            found = store.find(planned.kind, planned.version) if planned.action == "cached" else None
            references = {field: artifacts[stage] for field, stage in planned.config.references().items()}
            content = contents.get(planned.name, planned.version)
            artifacts[planned.name] = found or commit_stage(store, planned, references, content)
        return artifacts

    return build


@pytest.fixture
def outside_file(tmp_path) -> Path:
    path = tmp_path / "outside.txt"
    path.write_text("content")
    return path


@pytest.fixture
def refusing() -> Iterator[str]:
    """Provide an address that refuses connections, since its port is bound but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
