"""What the parameters of a deployment may change in a recipe."""

import json

import pytest

from flows.recipe.recipe import load_recipe
from flows.running.parameters import check_parameters
from flows.running.request import RefreshRequest
from stages.core.errors import RecipeError

STAGES = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m", "execution": {"environment": {"A": "b"}}},
    "rows": {"kind": "download", "dataset": "file://rows.jsonl"},
    "execution": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "rows"},
        "steps": 1,
        "global_batch_size": 1,
        "learning_rate": 1e-3,
    },
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps({"name": "held", "stages": STAGES}))
    (folder / "elsewhere").symlink_to("/etc")
    return folder


def check(folder, *overrides):
    check_parameters(RefreshRequest(str(folder / "recipe.yaml"), overrides))


@pytest.mark.parametrize(
    "override",
    [
        "stages.base.execution.environment=null",
        "stages.base.execution={}",
        "stages.execution.execution.launcher=slurm",
        "stages.execution.execution.slurm.partition=evil",
        "stages.execution.execution={kubernetes: {image: evil}}",
        "stages={base: {kind: download, model: builtin/qwen3-1m, execution: {launcher: slurm}}}",
        "stages={base: {kind: download, model: builtin/qwen3-1m}}",
    ],
)
def test_where_a_stage_runs_is_the_recipes_to_say(folder, override):
    with pytest.raises(RecipeError, match=r"parameters of a deployment.*\n.*only the recipe says where a stage runs"):
        check(folder, override)


@pytest.mark.parametrize(
    "override",
    [
        "stages.base.execution.environment.PYTHONPATH=evil",
        "stages.base.execution.environment={LD_PRELOAD: evil}",
        "stages.base.execution={retries: 1, environment: {A: c}}",
        "stages.execution.execution.environment.A=b",
        "stages.execution={kind: download, model: builtin/qwen3-1m, execution: {environment: {A: b}}}",
        "stages={base: {kind: download, model: builtin/qwen3-1m, execution: {environment: {A: c}}}}",
    ],
)
def test_variables_of_a_stage_are_no_override_of_anybody(folder, override):
    """Their names need not tell that they are secrets."""
    with pytest.raises(RecipeError, match="put the value into the recipe, or into the environment that") as refused:
        load_recipe(folder / "recipe.yaml", (override,))
    assert "evil" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "../other.jsonl",
        "file://../other.jsonl",
        "file://inside/../../other.jsonl",
        "~/.ssh/id_ed25519",
        "elsewhere/passwd",
        "file://elsewhere/passwd",
        "[inside.jsonl, ../other.jsonl]",
        "{a: {b: /etc/passwd}}",
    ],
)
def test_files_outside_the_recipes_folder_are_not_for_deployments(folder, value):
    with pytest.raises(RecipeError, match="names a file outside the recipe's folder"):
        check(folder, f"stages.rows.dataset={value}")


@pytest.mark.parametrize("value", ["rewards.py", "rewards.py:score", "file://x/rewards.pyc", "[native.so]"])
def test_programs_are_the_recipes_to_name(folder, value):
    with pytest.raises(RecipeError, match="only the recipe names programs"):
        check(folder, f"stages.rows.dataset={value}")


def test_so_is_whose_code_is_trusted(folder):
    with pytest.raises(RecipeError, match="only the recipe says whose code is trusted"):
        check(folder, "stages.execution.trust_remote_code=true")


@pytest.mark.parametrize(
    "override",
    [
        "stages.execution.learning_rate=2e-3",
        "stages.execution.execution.retries=0",
        "stages.execution.layout.tp=2",
        "stages.rows.dataset=file://other.jsonl",
        "stages.rows.dataset=file://inside/other.jsonl",
        "stages.rows.dataset=hf://datasets/org/name@main",
        "stages.base.model=org/a.python-model",
    ],
)
def test_what_is_learned_may_be_changed(folder, override):
    check(folder, override)


def test_all_that_may_not_be_is_said_at_once(folder):
    with pytest.raises(RecipeError) as refused:
        check(folder, "stages.execution.execution.launcher=slurm", "stages.rows.dataset=/etc/passwd")
    assert "stages.execution.execution.launcher" in str(refused.value)
    assert "stages.rows.dataset" in str(refused.value)


def test_what_is_no_override_is_left_to_the_recipes_reader(folder):
    check(folder, "stages.nowhere.model=/etc/passwd", "nonsense")
