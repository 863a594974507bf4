"""Parameters of a scheduled Prefect deployment may change only some fields of a recipe."""

import json
import os

import pytest

from flows.ledger.events import RefreshBegan
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import ledger_of
from flows.recipe.recipe import load_recipe
from flows.running.parameters import CODE_FIELDS, check_parameters, check_recipe
from flows.running.request import RefreshRequest
from stages.core.errors import RecipeError
from stages.core.fields import models_in
from stages.kinds.registry import KINDS

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
    "scores": {"kind": "evaluate", "model": "execution", "tasks": ["addition"], "task_folder": "tasks"},
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
    """Overrides cannot set environment variables of a stage, which may hold secrets whatever their names are."""
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


@pytest.mark.parametrize("field", ["trust_remote_code", "serving.trust_remote_code", "trust_task_code"])
def test_so_is_whose_code_is_trusted(folder, field):
    with pytest.raises(RecipeError, match="only the recipe says whose code is trusted"):
        check(folder, f"stages.execution.{field}=true")


@pytest.mark.parametrize("server", ["grpo.server", "distill.teacher_server", "distill.sampling.server"])
@pytest.mark.parametrize("said", ["url=http://elsewhere/v1", "key_variable=HF_TOKEN"])
def test_so_is_which_server_is_asked_and_with_which_key(folder, server, said):
    with pytest.raises(RecipeError, match="only the recipe says which server is asked, and with which key"):
        check(folder, f"stages.execution.{server}.{said}")


def test_every_field_that_trusts_code_is_among_those():
    assert {name for kind in KINDS.values() for name in names_in(kind) if "trust" in name} == CODE_FIELDS


def names_in(model):
    for name, field in model.model_fields.items():
        yield name
        for inner in models_in(field.annotation):
            yield from names_in(inner)


@pytest.mark.parametrize(
    ("stage", "field"), [("execution", "data.chat_template"), ("scores", "task_folder"), ("base", "model")]
)
def test_files_are_known_by_the_fields_that_name_them(folder, stage, field):
    for outside in ("/etc/passwd", "../other", "~/other", "file:///etc/passwd"):
        with pytest.raises(RecipeError, match=rf"stages.{stage}.{field}: names a file outside"):
            check(folder, f"stages.{stage}.{field}={outside}")
    check(folder, f"stages.{stage}.{field}=inside/other")


@pytest.mark.parametrize(
    "override",
    [
        "stages.answers.environment.tools=[{search: ~/.ssh}]",
        "stages.answers.environment={tools: [calculator, {search: /etc}]}",
        "stages.scores.episodes.environment={tools: [{search: ../other}]}",
    ],
)
def test_so_are_files_that_a_list_names(folder, override):
    answers = {
        "kind": "generate",
        "model": "base",
        "prompts": {"dataset": "rows"},
        "environment": {"tools": ["python"]},
    }
    stages = STAGES | {"answers": answers, "scores": STAGES["scores"] | {"episodes": {"num_samples": 2}}}
    (folder / "recipe.yaml").write_text(json.dumps({"name": "held", "stages": stages}))
    with pytest.raises(RecipeError, match=r"search: names a file outside the recipe's folder"):
        check(folder, override)
    check(folder, "stages.answers.environment.tools=[calculator, {search: inside/texts}]")


@pytest.mark.parametrize(
    "override",
    [
        "stages.execution.data.split=/no_think",
        "stages.execution.data.evaluation_split=../held",
        "stages.execution.adapter.target_modules=/proj.py",
        "stages.scores.tasks=[/no_think, ~nobody, ../up, /etc/passwd]",
        "stages.base.files=['/*.safetensors', '*.py']",
        "stages={base: {kind: download, model: builtin/qwen3-1m, execution: {environment: {A: b}}, files: [/a]}}",
        "name=/etc/passwd",
    ],
)
def test_a_text_that_looks_like_a_path_is_none_in_other_fields(folder, override):
    check(folder, override)


@pytest.mark.parametrize("other", ["other.yaml", "sub/../recipe.yaml", "/etc/passwd", ""])
def test_a_deployment_runs_the_recipe_that_it_was_made_for(folder, monkeypatch, other):
    monkeypatch.chdir(folder)
    registered = str(folder / "recipe.yaml")
    check_recipe(registered, "held", registered)
    check_recipe("recipe.yaml", "held", registered)
    with pytest.raises(RecipeError, match=rf"the deployment `held` runs {registered} alone, found {other};"):
        check_recipe(other, "held", registered)


def test_refreshes_by_hand_run_again_what_was_run_here(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    recipe = folder / "recipe.yaml"
    with pytest.raises(RecipeError, match=r"`by hand` runs recipes that were run in this home, found .*recipe.yaml"):
        check_recipe(str(recipe), "by hand", None)
    began = {"refresh": "held-1", "recipe": "held", "hardware": "", "git_commit": None, "stages": {}}
    process = ProcessIdentity.of(os.getpid())
    ledger_of("held-1").append(RefreshBegan(**began, recipe_path=recipe, process=process))
    check_recipe(str(recipe), "by hand", None)
    with pytest.raises(RecipeError, match="found /etc/passwd; give that one to `lifecycle schedule`"):
        check_recipe("/etc/passwd", "by hand", None)


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
        "stages.base.model=models:/held@champion",
        "stages.base.model=adopted:held",
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


@pytest.mark.parametrize(
    "override",
    [
        "stages.publish.to=hf://somebody/else",
        "stages.publish.private=false",
        "stages.publish.dry_run=null",
        "stages.scores={kind: publish, promotion: promote, to: 'hf://somebody/else'}",
    ],
)
def test_what_is_published_and_where_is_the_recipes_to_say(folder, override):
    publish = {"kind": "publish", "promotion": "promote", "to": "hf://owner/adder", "dry_run": True}
    (folder / "recipe.yaml").write_text(json.dumps({"stages": {**STAGES, "publish": publish}}))
    with pytest.raises(RecipeError, match="only the recipe says what is published, and where"):
        check(folder, override)
    check(folder, "stages.publish.execution.retries=1")
