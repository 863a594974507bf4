"""An artifact's version changes with everything that affects its content, and with nothing else."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from flows.recipe.version import differences, identity_of, resume_key_of, version_of
from stages.core.contract import StageConfig
from stages.core.fields import OutsideInput, Reference, find_marker
from stages.harnesses.registry import HARNESSES
from stages.kinds.registry import KINDS
from stages.kinds.train.methods.rollouts import NOT_LEARNED_FROM

CALIBRATION = {"dataset": "problems"}
TRAINING = {
    "kind": "train",
    "model": "base",
    "data": {"dataset": "problems", "chat_template": "template.jinja"},
    "global_batch_size": 5040,
    "learning_rate": 1e-4,
    "weight_decay": 0.1,
    "layout": {"dp_shard": 4},
}
MIXTURE = {"kind": "merge", "model": "base", "adapters": ["tuned", "other"], "density": 0.5}
HALF = {"fraction": 0.5}
CURATION = {"kind": "curate", "datasets": ["problems"], "exact_duplicates": True}
GENERATION = {"kind": "generate", "model": "base", "serving": {}, "prompts": {"dataset": "problems"}, "num_samples": 2}
ROLLOUTS = {"num_generations": 2, "max_completion_length": 1, "rewards": {"right": {"type": "exact_match"}}}
JUDGE = {"type": "judge", "url": "http://x/v1", "served_model": "critic", "template": "{completion}", "least": -1.0}
REASONING_GYM = {"reasoning_gym": "chain_sum", "options": {"max_terms": 2}}
SEVERAL = {
    "sums": {"environment": {"tools": ["calculator"]}, "weight": 2.0, "rewards": ["right"]},
    "game": {"environment": {"python": "game.py"}, "dataset": "other", "rewards": ["right"]},
}
EPISODES = {"environment": {"tools": ["calculator"]}, "rewards": {"right": {"type": "exact_match"}}}
RATING = {name: value for name, value in JUDGE.items() if name != "type"}
PAIRS = {"url": "http://x/v1", "served_model": "critic", "key_variable": "x"}
TOGETHER = {"datasets": [{"dataset": "problems"}]}
HELD_OUT = {**TRAINING["data"], "evaluation_fraction": 0.1}
SERVER = {"url": "http://host/v1", "served_model": "wise"}
ON_POLICY = {"lmbda": 0.5, "sampling": {"max_completion_length": 1, "server": SERVER}}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "download": [
        {"kind": "download", "model": "builtin/qwen3-1m"},
        {"kind": "download", "dataset": "builtin/addition"},
        {"kind": "download", "dataset": "hf://datasets/org/name"},
        {"kind": "download", "adapter": "hf://org/other", "base": "base"},
    ],
    "curate": [
        {**CURATION, "length": {"min_characters": 1, "max_characters": 5}, "near_duplicates": {}},
        {**CURATION, "length": {"min_turns": 1, "max_turns": 5}, "near_duplicates": {}},
        {**CURATION, "decontaminate": {"benchmarks": {"own": {"tasks": ["a"]}}}},
        {**CURATION, "decontaminate": {"benchmarks": {"own": {"harness": "judge", "tasks": ["a"]}}}},
        {**CURATION, "patterns": {"exclude": ["a"], "require": ["b"]}, "redact": ["phone"], "held_out": HALF},
        {**CURATION, "quality": {"rewards": {"own": {"type": "regex", "pattern": "b"}}, "above": 0}, "sample": HALF},
        {**CURATION, "sample": {"rows": 5}},
        {**CURATION, "language": {"keep": ["en"]}},
    ],
    "train": [
        {**TRAINING, "method": "sft"},
        {**TRAINING, "method": "dpo"},
        {**TRAINING, "method": "sft", "data": TOGETHER},
        {**TRAINING, "method": "sft", "data": HELD_OUT, "execution": {"evaluate_every_steps": 5}},
        {**TRAINING, "method": "dpo", "dpo": {"loss_type": "discopop", "loss_weights": [0.5]}},
        {**TRAINING, "method": "dpo", "dpo": {"rpo_alpha": 0.5, "ld_alpha": 0.5}},
        {**TRAINING, "method": "simpo"},
        {**TRAINING, "method": "orpo"},
        {**TRAINING, "method": "kto"},
        {**TRAINING, "method": "reward"},
        {**TRAINING, "method": "distill", "teacher": "other"},
        {**TRAINING, "method": "distill", "teacher": "other", "distill": ON_POLICY},
        {**TRAINING, "method": "distill", "distill": {"teacher_server": SERVER}},
        {**TRAINING, "method": "cpo"},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "beta": 0.1, "server": SERVER}},
        {**TRAINING, "method": "grpo", "grpo": ROLLOUTS},
        {**TRAINING, "method": "cpo", "cpo": {"loss_type": "simpo"}},
        {**TRAINING, "method": "sft", "optimizer": {"name": "muon"}},
        {**TRAINING, "method": "sft", "precision": "fp8"},
        {**TRAINING, "method": "sft", "moe": {"aux_loss_coefficient": 0.5}},
        {**TRAINING, "method": "sft", "adapter": {}},
        {**TRAINING, "method": "sft", "adapter": {"init": "eva"}},
        {**TRAINING, "method": "sft", "engine": "megatron"},
        {**TRAINING, "method": "sft", "engine": "megatron", "layout": {"pp": 2, "ep": 2, "dp_shard": 4}},
        {**TRAINING, "method": "sft", "freeze": ["vision_tower", "projector"]},
        {**TRAINING, "method": "sft", "freeze": ["language_model"]},
        {**TRAINING, "method": "sft", "part_learning_rates": {"vision_tower": 1e-6}},
        {**TRAINING, "method": "sft", "media": {"min_pixels": 4096, "max_pixels": 65536}},
        {**TRAINING, "method": "sft", "freeze": ["audio_tower"]},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "loss_type": "cispo", "epsilon_high": 5.0}},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "environment": {"tools": ["calculator"]}}},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "environment": {"python": "game.py"}}},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "environment": REASONING_GYM}},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "environments": SEVERAL}},
        {**TRAINING, "method": "grpo", "grpo": {**ROLLOUTS, "environment": {"openenv": "http://127.0.0.1:8000"}}},
    ],
    "merge": [
        {"kind": "merge", "model": "base", "adapter": "tuned"},
        {"kind": "merge", "model": "base", "adapters": ["tuned"]},
        {**MIXTURE, "combination": "ties"},
        {**MIXTURE, "combination": "dare_ties"},
    ],
    "quantize": [
        {"kind": "quantize", "model": "base", "method": "awq", "calibration": CALIBRATION},
        {"kind": "quantize", "model": "base", "method": "gguf", "gguf_type": "q8_0", "calibration": CALIBRATION},
    ],
    "serve": [
        {"kind": "serve", "model": "base"},
        {"kind": "serve", "model": "base", "benchmark": {"input_tokens": 1, "output_tokens": 1}},
        {"kind": "serve", "model": "base", "serving": {"arguments": {"block-size": 16}}},
        {"kind": "serve", "model": "base", "speculative": "mtp"},
        {"kind": "serve", "model": "base", "speculative": {"draft": "base"}},
    ],
    "evaluate": [
        {"kind": "evaluate", "model": "base", "tasks": ["a"], "serving": {}, "task_folder": "tasks"},
        {"kind": "evaluate", "model": "base", "harness": "judge", "tasks": ["a"], "judge": RATING},
        {
            "kind": "evaluate",
            "model": "base",
            "harness": "judge",
            "tasks": ["a"],
            "judge": {**RATING, "template": None},
        },
        {"kind": "evaluate", "model": "base", "harness": "environment", "tasks": ["a"], "episodes": EPISODES},
    ],
    "publish": [{"kind": "publish", "promotion": "promote", "to": "hf://org/name", "private": False}],
    "generate": [
        {**GENERATION, "rewards": {"right": {"type": "exact_match"}, "own": {"type": "python", "file": "score.py"}}},
        {**GENERATION, "rewards": {"right": {"type": "math", "no_answer": -0.5}}},
        {**GENERATION, "rewards": {"right": {"type": "number"}, "like": {"type": "regex", "pattern": "x"}}},
        {
            **GENERATION,
            "rewards": {"form": {"type": "format"}, "brief": {"type": "length", "max_tokens": 4}},
            "keep": "pairs",
        },
        {
            **GENERATION,
            "rewards": {"form": {"type": "json_schema", "json_schema": {}}, "tested": {"type": "code"}},
            "keep": {"above": 0.1},
        },
        {
            **GENERATION,
            "rewards": {"form": {"type": "format"}},
            "keep": {"solved": [0, 1]},
        },
        {**GENERATION, "rewards": {"liked": JUDGE, "likely": {"type": "reward_model", "model": "critic"}}},
        {**GENERATION, "rewards": {"liked": {**JUDGE, "template": None, "key_variable": "x"}}},
        {**GENERATION, "environment": {"tools": ["calculator"]}},
        {**GENERATION, "environment": {"program": "python agent.py", "files": ["agent.py"]}},
    ],
    "promote": [
        {"kind": "promote", "name": "helper", "model": "base", "evaluations": ["scores"]},
        {"kind": "promote", "name": "helper", "model": "base", "evaluations": ["scores"], "pairs": PAIRS},
        {
            **{"kind": "promote", "name": "helper", "model": "base", "evaluations": ["scores"]},
            "pairs": {**PAIRS, "template": "{first} {second}"},
        },
        {"kind": "promote", "name": "x", "model": "base", "evaluations": ["scores"], "approval": {"by": ["staff"]}},
    ],
}
SOURCES = ("hf://org/name", "hf://datasets/org/name", "file:///x")
MAPPINGS = ({"x": "y"}, {"x": "prompt"}, {"x": 0.5}, {"X": "x/y"}, {"schedulerName": "x"})
TEXTS = ("x", "1:30:00", "2026-02-03", "https://x/v1")
VALUES = (
    None,
    True,
    False,
    1,
    2,
    4,
    20,
    0.25,
    1.5,
    1e-3,
    *SOURCES,
    *TEXTS,
    *HARNESSES,
    [3],
    [0.5],
    ["x"],
    ["email"],
    ["--x"],
    ["ipo"],
    ["de"],
    *MAPPINGS,
    ["projector"],
    [1, 1],
    ["http://y/v1"],
    ["python"],
)
"""Sample values of every type that a config field may have; a new type of field needs a sample here."""

UPSTREAM = {
    "base": "0123456789ab",
    "problems": "ba9876543210",
    "scores": "0a1b2c3d4e5f",
    "tuned": "a0b1c2d3e4f5",
    "critic": "c0b1a2d3e4f5",
    "promote": "c0ffee123456",
    "other": "b",
}
OUTSIDE = {"task_folder": "f" * 64}


def leaves(model: BaseModel, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every innermost field of a config that may have more than one value."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        of_items = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else field.annotation
        fixed = get_origin(of_items) is Literal and len(get_args(of_items)) == 1
        marked = find_marker(field, Reference) or find_marker(field, OutsideInput)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*above, name))
        elif models := {key: item for key, item in _items(value) if isinstance(item, BaseModel)}:
            for key, item in models.items():
                yield from leaves(item, (*above, name, key))
        elif not fixed and not marked:
            yield (*above, name)


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, tuple):
        return [(str(number), item) for number, item in enumerate(value)]
    return list(dict(value).items()) if isinstance(value, dict | BaseModel) else []


def inside(tree: Any, part: str) -> Any:
    """Return the child of a dict or list by key or index, or {} if there is none."""
    if isinstance(tree, list):
        return tree[int(part)] if int(part) < len(tree) else {}
    return tree.get(part) or {}


def literals(annotation: Any) -> set[str]:
    """Return the strings that a type annotation lists in `Literal`, at any depth."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for part in get_args(annotation) for word in literals(part)}


@functools.cache
def examples(kind: str) -> list[StageConfig]:
    return [KINDS[kind].model_validate(example) for example in EXAMPLES[kind]]


@functools.cache
def dumped(kind: str) -> list[dict[str, Any]]:
    """Return the JSON objects of all example configs of a kind; a test that changes one must restore it."""
    return [config.model_dump(mode="json") for config in examples(kind)]


@functools.cache
def accepted(model: type[BaseModel], name: str) -> list[Any]:
    """Return sample values valid for a field by its type alone, to spare validations of whole configs."""
    field = model.model_fields[name]
    # In a tuple, since a type may not be one of a model alone.
    alone = TypeAdapter(tuple[Annotated[field.annotation, field]])
    values = []
    for value in (*VALUES, *sorted(literals(field.annotation))):
        with contextlib.suppress(ValidationError):
            alone.validate_python((value,))
            values.append(value)
    return values


def variants(kind: str, path: tuple[str, ...]) -> Iterator[tuple[StageConfig, StageConfig]]:
    """Yield valid configs that differ only in the field at `path`, the first of each two an example.

    Each example and each value that any example takes is in a pair, not each value with each example.
    """
    tried: list[Any] = []
    for config, tree in zip(examples(kind), dumped(kind), strict=True):
        parent = functools.reduce(inside, path[:-1], tree)
        if path[-1] not in parent:
            continue
        model = functools.reduce(lambda value, part: dict(_items(value))[part], path[:-1], config)
        is_paired, before = False, parent[path[-1]]
        for value in accepted(type(model), path[-1]):
            if is_paired and json.dumps(value) in tried:
                continue
            parent[path[-1]] = value
            with contextlib.suppress(ValidationError):
                other = KINDS[kind].model_validate(tree)
                # A value that was taken for another one (true for 1) is not what is asked about.
                said = functools.reduce(inside, path[:-1], other.model_dump(mode="json", include={path[0]}))[path[-1]]
                if other != config and json.dumps(said) == json.dumps(value):
                    is_paired = True
                    tried.append(json.dumps(value))
                    yield config, other
        parent[path[-1]] = before


def version(config: StageConfig) -> str:
    return version_of(identity_of(config, UPSTREAM, OUTSIDE))


def resume_key(config: StageConfig) -> str:
    return resume_key_of(config, UPSTREAM, OUTSIDE)


@functools.cache
def paths(kind: str) -> list[tuple[str, ...]]:
    found = [path for example in examples(kind) for path in leaves(example)]
    nested = {path[:depth] for path in found for depth in range(1, len(path))}
    return [path for path in dict.fromkeys(found) if path not in nested]


def test_every_kind_has_an_example():
    assert EXAMPLES.keys() == KINDS.keys()


def is_of_execution(path: tuple[str, ...]) -> bool:
    """Return whether a field is of the block `execution`, or one of the few beside it that are about devices only."""
    return path[0] == "execution" or path[-1] in NOT_LEARNED_FROM


@pytest.mark.parametrize("kind", KINDS)
def test_every_identity_field_changes_the_version(kind):
    known = {id(example): version(example) for example in examples(kind)}
    for path in paths(kind):
        if not is_of_execution(path):
            pairs = list(variants(kind, path))
            assert pairs, f"no second value was found for {path}"
            assert [other for config, other in pairs if known[id(config)] == version(other)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_execution_field_changes_the_version(kind):
    known = {id(example): (version(example), resume_key(example)) for example in examples(kind)}
    for path in paths(kind):
        if is_of_execution(path):
            pairs = list(variants(kind, path))
            assert pairs, f"no second value was found for {path}"
            for config, other in pairs:
                assert known[id(config)] == (version(other), resume_key(other))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values))
def test_the_order_of_keys_and_a_round_trip_through_a_file_change_no_version(identity):
    backwards = dict(reversed(identity.items()))
    assert version_of(json.loads(json.dumps(backwards))) == version_of(identity)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "download"])
def test_versions_and_not_names_of_upstream_stages_count(kind):
    example = EXAMPLES[kind][0]
    config = KINDS[kind].model_validate(example)
    name = next(iter(config.references().values()))
    assert version_of(identity_of(config, {**UPSTREAM, name: "b" * 12}, OUTSIDE)) != version(config)
    renamed = KINDS[kind].model_validate_json(json.dumps(example).replace(f'"{name}"', '"renamed"'))
    assert version_of(identity_of(renamed, {**UPSTREAM, "renamed": UPSTREAM[name]}, OUTSIDE)) == version(config)


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
    assert resume_key(config) == resume_key(other)
    assert resume_key(config) != resume_key(longer)


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
        "learning_rate 0.0001 → 2e-5",
        "steps none → 10",
        f"version of model {UPSTREAM['base']} → {'b' * 12}",
    ]
    assert differences(old, old) == []


def test_what_was_empty_and_is_left_out_is_no_difference_and_contents_are_told_without_their_hashes():
    promote = KINDS["promote"].model_validate(EXAMPLES["promote"][0])
    old, new = (identity_of(promote, UPSTREAM, {"task_folder": digit * 64}) for digit in "ab")
    old["config"]["baselines"] = []
    new["config"].pop("baselines", None)
    assert [str(found) for found in differences(old, new)] == ["content of task_folder has changed"]


def test_of_a_mapping_that_was_empty_its_entries_are_told():
    promote = EXAMPLES["promote"][0]
    none, one = (
        identity_of(KINDS["promote"].model_validate({**promote, "gates": {"min_scores": scores}}), UPSTREAM, {})
        for scores in ({}, {"sums.exact_match": 0.9})
    )
    assert [str(found) for found in differences(none, one)] == ["gates.min_scores.sums.exact_match none → 0.9"]
    assert [str(found) for found in differences(one, none)] == ["gates.min_scores.sums.exact_match 0.9 → none"]


def test_a_field_that_was_added_later_is_no_part_of_the_identity_until_it_is_set():
    quantize = EXAMPLES["quantize"][0]
    default, stated, other = (
        KINDS["quantize"].model_validate({**quantize, "calibration": {**CALIBRATION, **more}}).identity()["calibration"]
        for more in ({}, {"evaluate_on": "all"}, {"evaluate_on": "assistant"})
    )
    assert default == stated
    assert "evaluate_on" not in default
    assert other == {**default, "evaluate_on": "assistant"}


def test_what_one_side_leaves_out_and_the_other_has_unset_is_no_difference():
    promote = EXAMPLES["promote"][0]
    upstream = {**UPSTREAM, "served": "c" * 12}
    served = identity_of(KINDS["promote"].model_validate({**promote, "server": "served"}), upstream, {})
    alone = identity_of(KINDS["promote"].model_validate(promote), upstream, {})
    assert [str(difference) for difference in differences(served, alone)] == [f"version of server {'c' * 12} → none"]
