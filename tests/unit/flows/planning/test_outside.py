"""Local files that a recipe names affect artifact versions by their content, not by their path."""

import shutil
import time

import pytest

from flows.planning import outside as outside_module
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.store.content import hash_path
from flows.store.record import Index
from stages.core.errors import RecipeError, TransientError
from stages.hubs.builtin import hub
from stages.remote import http


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    (folder / "inner").mkdir(parents=True)
    (folder / "addition.yaml").write_text("task: addition\n")
    (folder / "inner" / "rows.jsonl").write_text("{}\n")
    return folder


def test_a_copy_elsewhere_hashes_the_same(tasks, tmp_path):
    shutil.copytree(tasks, tmp_path / "elsewhere")
    assert hash_path(tasks) == hash_path(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        lambda tasks: (tasks / "addition.yaml").write_text("task: Addition"),
        lambda tasks: (tasks / "addition.yaml").rename(tasks / "sum.yaml"),
        lambda tasks: (tasks / "inner" / "rows.jsonl").rename(tasks / "rows.jsonl"),
        lambda tasks: (tasks / "more.yaml").touch(),
        lambda tasks: (tasks / "inner" / "rows.jsonl").unlink(),
    ],
)
def test_any_change_of_names_or_contents_changes_the_hash(tasks, change):
    before = hash_path(tasks)
    change(tasks)
    assert hash_path(tasks) != before


def test_outside_paths_are_resolved_to_hashes(tasks, tmp_path):
    tree = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["addition"], "task_folder": "tasks"},
    }
    recipe = load_stages("small", tmp_path, tree)
    assert resolve_outside(recipe)["scores"]["task_folder"] == hash_path(tasks)
    shutil.rmtree(tasks)
    assert "scores" not in resolve_outside(recipe, ["base"]), "what is not asked for is not looked at"
    with pytest.raises(RecipeError, match=r"stages\.scores\.task_folder: there is no file or folder .*tasks"):
        resolve_outside(recipe)


def test_what_needs_no_network_is_known_to_a_plan_that_has_no_time(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(outside_module, "PLANNING_LIMIT_S", 0.0)
    resolve = hub.HUB.resolve_revision

    def resolve_slowly(request):
        time.sleep(0.2)
        return resolve(request)

    monkeypatch.setattr(type(hub.HUB), "resolve_revision", lambda _, request: resolve_slowly(request))
    tree = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "rows": {"kind": "download", "dataset": f"file://{tasks}"},
    }
    assert all(resolve_outside(load_stages("small", tmp_path, tree), unreachable={}).values())


def test_a_hub_that_does_not_answer_stops_a_refresh_but_not_a_plan(tmp_path, monkeypatch, refusing):
    monkeypatch.setenv("HF_ENDPOINT", refusing)
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.001)
    tree = {
        "base": {"kind": "download", "model": "hf://org/name"},
        "problems": {"kind": "download", "dataset": "builtin/addition"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["addition"], "task_folder": str(tmp_path)},
    }
    recipe = load_stages("small", tmp_path, tree)
    with pytest.raises(TransientError, match="hf://org/name"):
        resolve_outside(recipe, ["base"])
    unreachable = {}
    outside = resolve_outside(recipe, ["base", "problems"], unreachable)
    assert outside["problems"] and not outside["base"]
    planned = plan(recipe, {**outside, "scores": {}}, Index(()), unreachable=unreachable)
    assert planned.unknown.keys() == {"base", "scores"}
    assert "stands on base" in planned.unknown["scores"]
