"""Planning errors contain no secrets, and a cached stage can be planned even if its programs are not installed."""

import json
from pathlib import Path

import pytest

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import LifecycleError, ResourceError
from stages.harnesses.evalscope.harness import EvalScope
from stages.harnesses.installation import EVALSCOPE
from stages.serving.registry import ENGINES
from stages.serving.vllm.engine import VllmProgram

SECRET = "plantedabcdef0123"


@pytest.fixture
def message(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def message(**stages):
        downloads = {
            "base": {"kind": "download", "model": "builtin/qwen3-1m"},
            "rows": {"kind": "download", "dataset": "builtin/addition"},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"stages": {**downloads, **stages}}))
        with pytest.raises(LifecycleError) as caught:
            make_plan(RefreshRequest(str(path)))
        return str(caught.value)

    return message


KNOWS_IT = {"execution": {"environment": {"OWN_SECRET": SECRET}}}


def test_a_chat_template_that_is_quoted(message, tmp_path):
    (tmp_path / "own.jinja").write_text(f"{{{{ a {SECRET} }}}}")
    train = {"kind": "train", "method": "sft", "model": "base", "global_batch_size": 8, "learning_rate": 1e-4}
    said = message(sft={**train, **KNOWS_IT, "data": {"dataset": "rows", "chat_template": "own.jinja"}})
    assert """is not a Jinja template: "expected token 'end of print statement', got '***'" """.strip() in said


def test_a_task_that_is_quoted(message, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(f"task: own\n{SECRET}: [\n")
    said = message(scores={"kind": "evaluate", "model": "base", "tasks": ["own"], "task_folder": "tasks", **KNOWS_IT})
    assert "own.yaml is no readable YAML" in said
    assert SECRET not in said
    assert "***" in said


def test_what_is_built_is_planned_where_its_harness_is_missing(tmp_path, monkeypatch, build) -> None:
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.setattr(type(ENGINES["vllm"]), "find_program", lambda _: VllmProgram(Path(), Path(), "0.32"))
    monkeypatch.setattr(EvalScope, "version", lambda _: "1.13")
    monkeypatch.setattr(EvalScope, "to_install", lambda _: None)
    (tmp_path / "tasks").mkdir()
    questions = tmp_path / "tasks" / "sums.jsonl"
    questions.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    scores = {"kind": "evaluate", "model": "base", "harness": "evalscope", "tasks": ["sums"], "task_folder": "tasks"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": {"base": {"kind": "download", "model": "builtin/qwen3-1m"}, "s": scores}}))
    request = RefreshRequest(str(recipe))
    build(make_plan(request).plan)
    monkeypatch.undo()
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.setattr(type(ENGINES["vllm"]), "find_program", lambda _: VllmProgram(Path(), Path(), "0.32"))
    monkeypatch.setenv(EVALSCOPE.variable, str(tmp_path / "gone" / "python"))

    planned = make_plan(request)
    assert {stage.action for stage in planned.plan.stages.values()} == {"cached"}
    assert [note for note in planned.notes if note.startswith("s: cached, ") and "EvalScope was not found" in note]
    with pytest.raises(ResourceError, match=r"stages\.s: EvalScope was not found"):
        make_plan(RefreshRequest(str(recipe), force=("s",)))
    questions.write_text('{"prompt": "1 + 1", "answer": "3"}\n')
    with pytest.raises(ResourceError, match="EvalScope was not found"):
        make_plan(request)
