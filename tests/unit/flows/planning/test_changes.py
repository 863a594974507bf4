"""A plan says which files changed and by how many rows, and what code from outside would run."""

import json
import shutil
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.planning.changes import with_changes

CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.fixture
def lifecycle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return ended.value.code, output.out + output.err

    return run


def write_rows(file, number, word="Hello"):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]}
    file.write_text((json.dumps(row) + "\n") * number)


@pytest.fixture
def rows(tmp_path, lifecycle):
    """A folder that was adopted, and the recipe that names it."""
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "train.jsonl", 300)
    write_rows(folder / "validation.jsonl", 20)
    (folder / "prices.csv").write_text("a,b\n1,2\n3,4\n")
    assert lifecycle("adopt", folder, "--kind", "dataset", "--name", "mine")[0] == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages:\n  mine: {kind: download, dataset: file://rows}\n")
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: write_rows(rows / "train.jsonl", 350), "train.jsonl 300 → 350 rows"),
        (lambda rows: write_rows(rows / "train.jsonl", 300, "Other"), "train.jsonl other rows, 300 rows"),
        (lambda rows: write_rows(rows / "more.jsonl", 7), "more.jsonl is new (7 rows)"),
        (lambda rows: (rows / "validation.jsonl").unlink(), "validation.jsonl is gone"),
        (lambda rows: (rows / "prices.csv").write_text("a,b\n1,2\n"), "prices.csv 2 → 1 rows"),
    ],
)
def test_files_that_changed_are_named_instead_of_two_hashes(lifecycle, rows, change, told):
    change(rows)
    code, said = lifecycle("plan", rows.parent / "recipe.yaml")
    assert code == 0
    assert f": files of file://{rows}: {told}\n" in said
    assert "content of revision" not in said


def test_a_source_elsewhere_is_named_with_its_path(lifecycle, rows, recipe, make_plan, build, store, tmp_path):
    """From files, and to files."""
    other = rows.parent / "recipe.yaml"
    other.write_text("stages:\n  mine: {kind: download, dataset: builtin/addition}\n")
    assert f"dataset file://{rows} → builtin/addition" in lifecycle("plan", other)[1]
    build(make_plan(recipe()))
    planned = make_plan(recipe(problems={"dataset": f"file://{rows}"}))
    reasons = with_changes(planned, store.index(), tmp_path / "kept").stages["problems"].reason
    assert f"dataset builtin/addition → file://{rows}" in reasons


def test_of_many_files_the_first_are_named(lifecycle, rows):
    for number in range(9):
        write_rows(rows / f"more-{number}.jsonl", 1)
    assert "more-4.jsonl is new (1 rows), and 4 more files" in lifecycle("plan", rows.parent / "recipe.yaml")[1]


def test_where_it_came_from_is_shown_with_its_path(lifecycle, rows):
    _, said = lifecycle("show", "mine")
    assert f"dataset: file://{rows}\n" in said


def test_code_from_outside_is_shown(lifecycle, tmp_path):
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")
    (tmp_path / "tasks" / "own.yaml").write_text("include: addition.yaml\ntask: own\ndoc_to_text: !function own.ask\n")
    (tmp_path / "tasks" / "own.py").write_text("def ask(row):\n    return row['question']\n")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m", "trust_remote_code": True},
        "served": {"kind": "serve", "model": "base", "serving": {"trust_remote_code": True}},
        "scores": {"kind": "evaluate", "model": "served", "tasks": ["own"], "task_folder": "tasks"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": stages}))
    assert "trust_task_code" in lifecycle("plan", recipe)[1]
    code, said = lifecycle("plan", recipe, "--set", "stages.scores.trust_task_code=true")
    assert code == 0
    assert "base runs code from outside: trust_remote_code: Python files that come with the model" in said
    assert "served runs code from outside: serving.trust_remote_code: Python files" in said
    assert "scores runs code from outside: " in said and "own.ask" in said
    _, said = lifecycle("plan", recipe, "--set", "stages.scores.trust_task_code=true", "--json")
    assert [bool(stage["custom_code"]) for stage in json.loads(said)["stages"]] == [True, True, True]


def test_a_task_beside_the_recipe_is_pointed_at(lifecycle, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "subtraction.yaml").write_text("task: subtraction\n")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["subtraction"]},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": stages}))
    _, said = lifecycle("plan", recipe)
    assert f"stages.scores: the task subtraction is in {tmp_path}/tasks/subtraction.yaml" in said
    assert "write `task_folder: tasks`" in said and "did you mean" not in said


def test_a_task_that_is_found_and_a_recipe_of_its_name_are_not_pointed_at(lifecycle, tmp_path):
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["addition", "other"], "task_folder": "tasks"},
    }
    for name in ("addition", "other"):  # neither is a task
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"stages": stages}))
    _, said = lifecycle("plan", tmp_path / "other.yaml")
    assert f"stages.scores: neither {tmp_path}/tasks nor lm-eval has a task 'other'" in said
