"""Config fields that another field makes ineffective are refused or reported when a plan is made."""

import json
from pathlib import Path

import pytest

from flows.planning.checks import check_idle
from flows.recipe.recipe import load_recipe
from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import RecipeError
from stages.core.fields import models_in
from stages.kinds.registry import KINDS

CONFIGS = Path(__file__).parents[4] / "configs"
TRAIN = {"kind": "train", "method": "sft", "model": "base", "global_batch_size": 8, "learning_rate": 1e-4}
STAGES = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "rows": {"kind": "download", "dataset": "builtin/addition"},
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def write(fields, data):
        stages = {**STAGES, "tuned": {**TRAIN, **fields, "data": {"dataset": "rows", **data}}}
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"stages": stages}))
        return path

    return write


@pytest.mark.parametrize(
    ("fields", "data", "message"),
    [
        (
            {"schedule": "constant", "min_learning_rate_fraction": 0.1},
            {},
            "min_learning_rate_fraction: 0.1 does nothing: `schedule: constant` ends where it began; remove it",
        ),
        ({"decay_norms_and_biases": True}, {}, "decay_norms_and_biases: true does nothing: `weight_decay` is 0"),
        (
            {},
            {"evaluation_split": "validation", "evaluation_fraction": 0.1},
            "data.evaluation_fraction: 0.1 does nothing: `evaluation_split: validation` is held out",
        ),
        ({}, {"max_bad_row_fraction": 0.5}, "data.max_bad_row_fraction: 0.5 does nothing: `on_bad_rows: fail`"),
        ({}, {"format": "text", "turns": "separately"}, 'data.turns: "separately" does nothing: `format: text` has no'),
        ({}, {"format": "text", "template_date": "2025-01-01"}, 'data.template_date: "2025-01-01" does nothing'),
        ({}, {"train_on": "all", "turns": "separately"}, "data.turns: .* does nothing: `train_on: all`"),
        ({"method": "dpo"}, {"turns": "separately"}, "data.turns: .* does nothing: `method: dpo`"),
    ],
)
def test_what_changes_the_version_and_nothing_else_is_refused(write, fields, data, message):
    with pytest.raises(RecipeError, match=rf"stages\.tuned\.{message}"):
        make_plan(RefreshRequest(str(write(fields, data))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 5, "epochs": 3}, "tuned: `epochs: 3.0` does nothing: `steps: 5` says how long to train"),
        (
            {"execution": {"evaluate_every_steps": 5}},
            "tuned: `execution.evaluate_every_steps: 5` does nothing: no rows are held out",
        ),
        ({"execution": {"slurm": {"partition": "gpu"}}}, '`execution.slurm: {"partition": "gpu"}` does nothing'),
        ({"execution": {"kubernetes": {"image": "i"}}}, '`execution.kubernetes: {"image": "i"}` does nothing: the '),
    ],
)
def test_what_is_often_overridden_is_only_said(write, fields, message):
    notes = make_plan(RefreshRequest(str(write(fields, {})))).notes
    assert [note for note in notes if message in note]


def test_what_has_its_default_is_not_said(write):
    defaults = {"schedule": "constant", "min_learning_rate_fraction": 0.0, "steps": 5, "epochs": 1.0}
    assert not make_plan(RefreshRequest(str(write(defaults, {"evaluation_fraction": 0.0})))).notes


def test_only_stages_that_are_asked_for_count(write):
    recipe = load_recipe(write({"decay_norms_and_biases": True}, {}))
    assert not check_idle(recipe, ["base", "rows"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_say_nothing_idle(path):
    recipe = load_recipe(path)
    assert not check_idle(recipe, recipe.stages)
    for config in recipe.stages.values():
        for field, _ in config.idle_fields():
            model = KINDS[config.kind]
            for part in field.split("."):  # each names a field that there is
                annotation = model.model_fields[part].annotation
                model = next(iter(models_in(annotation)), model)
