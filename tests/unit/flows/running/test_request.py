"""What is said of a plan that cannot be made holds nothing that the recipe gives to stages as a secret."""

import json

import pytest

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import LifecycleError

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
    assert "is not a Jinja template: expected token 'end of print statement', got '***'" in said


def test_a_task_that_is_quoted(message, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(f"task: own\n{SECRET}: [\n")
    said = message(scores={"kind": "evaluate", "model": "base", "tasks": ["own"], "task_folder": "tasks", **KNOWS_IT})
    assert "own.yaml is no readable YAML" in said
    assert SECRET not in said
    assert "***" in said
