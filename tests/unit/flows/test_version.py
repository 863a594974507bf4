"""A version changes with everything that changes an artifact, and with nothing else."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flows.version import differences, identity_of, resume_key_of, version_of
from stages.contract import OutsideInput, Reference, StageConfig, find_marker
from stages.kinds import KINDS

CALIBRATION = {"dataset": "problems"}
TRAINING = {
    "kind": "train",
    "model": "base",
    "data": {"dataset": "problems", "chat_template": "template.jinja"},
    "global_batch_size": 5040,
    "learning_rate": 1e-4,
    "layout": {"dp_shard": 4},
}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "download": [
        {"kind": "download", "model": "builtin/qwen3-1m"},
        {"kind": "download", "dataset": "builtin/addition"},
    ],
    "train": [{**TRAINING, "method": "sft"}, {**TRAINING, "method": "dpo"}],
    "quantize": [{"kind": "quantize", "model": "base", "method": "awq", "calibration": CALIBRATION}],
    "serve": [{"kind": "serve", "model": "base"}],
    "evaluate": [{"kind": "evaluate", "model": "base", "tasks": ["a"], "serving": {}, "task_folder": "tasks"}],
}
SOURCES = st.sampled_from(["hf://org/name", "modelscope://org/name", "file:///x", "builtin/addition"])
UPSTREAM = {"base": "0123456789ab", "problems": "ba9876543210"}
OUTSIDE = {"task_folder": "f" * 64}


def leaves(model: BaseModel, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Path and field of everything in a config that holds no further model."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), field


def fields(kind: str, *, of_execution: bool) -> list[tuple[str, ...]]:
    found = {}
    for example in EXAMPLES[kind]:
        for path, field in leaves(KINDS[kind].model_validate(example)):
            marked = find_marker(field, Reference) or find_marker(field, OutsideInput)
            if path != ("kind",) and not marked and (path[0] == "execution") == of_execution:
                found[path] = None
    return list(found)


def other_configs(kind: str, path: tuple[str, ...], data: st.DataObject) -> tuple[StageConfig, StageConfig]:
    """An example, and a valid config that differs from it in the field at `path`."""
    config = KINDS[kind].model_validate(data.draw(st.sampled_from(EXAMPLES[kind])))
    found = dict(leaves(config)).get(path)
    assume(found is not None)
    strategy = st.from_type(Annotated[found.annotation, *found.metadata] if found.metadata else found.annotation)
    value = data.draw(st.one_of(strategy, SOURCES, st.integers(1, 8)))
    tree = config.model_dump(mode="json")
    parent = tree
    for part in path[:-1]:
        parent = parent[part]
    assume(parent[path[-1]] != value)
    parent[path[-1]] = value
    try:
        other = KINDS[kind].model_validate(tree)
    except ValidationError:
        assume(False)
    assume(other != config)
    return config, other


def version(config: StageConfig) -> str:
    return version_of(identity_of(config, UPSTREAM, OUTSIDE))


CASES = [(kind, path) for kind in KINDS for path in fields(kind, of_execution=False)]
EXECUTION_CASES = [(kind, path) for kind in KINDS for path in fields(kind, of_execution=True)]
quick = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def test_every_kind_has_an_example():
    assert EXAMPLES.keys() == KINDS.keys()


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{kind}.{'.'.join(path)}" for kind, path in CASES])
@quick
@given(data=st.data())
def test_every_identity_field_changes_the_version(kind, path, data):
    config, other = other_configs(kind, path, data)
    assert version(config) != version(other)


@pytest.mark.parametrize(
    ("kind", "path"), EXECUTION_CASES, ids=[f"{kind}.{'.'.join(path)}" for kind, path in EXECUTION_CASES]
)
@quick
@given(data=st.data())
def test_no_execution_field_changes_the_version(kind, path, data):
    config, other = other_configs(kind, path, data)
    assert version(config) == version(other)
    assert resume_key_of(config, UPSTREAM, OUTSIDE) == resume_key_of(other, UPSTREAM, OUTSIDE)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "download"])
def test_versions_and_not_names_of_upstream_stages_count(kind):
    config = KINDS[kind].model_validate(EXAMPLES[kind][0])
    assert version_of(identity_of(config, {**UPSTREAM, "base": "b" * 12}, OUTSIDE)) != version(config)
    renamed = KINDS[kind].model_validate({**EXAMPLES[kind][0], "model": "renamed"})
    assert version_of(identity_of(renamed, {**UPSTREAM, "renamed": UPSTREAM["base"]}, OUTSIDE)) == version(config)


def test_content_and_not_place_of_outside_paths_counts():
    example = EXAMPLES["evaluate"][0]
    config = KINDS["evaluate"].model_validate(example)
    moved = KINDS["evaluate"].model_validate({**example, "task_folder": "/elsewhere/tasks"})
    assert moved.outside_paths() == {"task_folder": Path("/elsewhere/tasks")}
    assert version(moved) == version(config)
    assert version_of(identity_of(config, UPSTREAM, {"task_folder": "e" * 64})) != version(config)


def test_the_layout_is_identity_but_an_interrupted_run_may_resume_under_another():
    config = KINDS["train"].model_validate(EXAMPLES["train"][0])
    other = KINDS["train"].model_validate({**EXAMPLES["train"][0], "layout": {"dp_shard": 2}})
    longer = KINDS["train"].model_validate({**EXAMPLES["train"][0], "learning_rate": 2e-4})
    assert version(config) != version(other)
    assert resume_key_of(config, UPSTREAM, OUTSIDE) == resume_key_of(other, UPSTREAM, OUTSIDE)
    assert resume_key_of(config, UPSTREAM, OUTSIDE) != resume_key_of(longer, UPSTREAM, OUTSIDE)


def test_the_stage_version_counts(monkeypatch):
    config = KINDS["serve"].model_validate(EXAMPLES["serve"][0])
    before = version(config)
    monkeypatch.setattr(KINDS["serve"], "STAGE_VERSION", KINDS["serve"].STAGE_VERSION + 1)
    assert version(config) != before


def test_a_version_is_twelve_digits_of_the_sha256_of_canonical_json():
    text = b'{"config":{"a":1.5,"b":"\\u00e9"},"kind":"train"}'
    assert version_of({"kind": "train", "config": {"b": "é", "a": 1.5}}) == hashlib.sha256(text).hexdigest()[:12]


def test_differences_are_told_field_by_field():
    old = identity_of(KINDS["train"].model_validate(EXAMPLES["train"][0]), UPSTREAM, {})
    changed = {**EXAMPLES["train"][0], "learning_rate": 2e-5, "layout": {"dp_shard": 2}, "steps": 10}
    new = identity_of(KINDS["train"].model_validate(changed), {**UPSTREAM, "base": "b" * 12}, {"revision": "c"})
    assert [str(difference) for difference in differences(old, new)] == [
        "content of revision none → c",
        "layout.dp_shard 4 → 2",
        "learning_rate 1e-4 → 2e-5",
        "steps none → 10",
        f"version of model {UPSTREAM['base']} → {'b' * 12}",
    ]
    assert differences(old, old) == []
