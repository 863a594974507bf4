"""Tasks by name: from the folder without asking lm-eval, from lm-eval, or unknown to both."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from stages.errors import EvaluationError
from stages.evaluate.tasks import select_tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "addition.yaml").write_text(
        "task: addition\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
    )
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds lm-eval's index already, as after the first evaluation that needed it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"lm-eval-{version('lm_eval')}-tasks.json").write_text(json.dumps(["gsm8k", "hellaswag", "mmlu"]))
    return cache


def test_local_tasks_need_neither_the_index_nor_a_hub(folder: Path, tmp_path: Path) -> None:
    selection = select_tasks(("addition",), folder, tmp_path / "cache")

    assert selection.offline
    assert not selection.needs_builtin
    assert not (tmp_path / "cache").exists()


def test_builtin_and_local_tasks_go_together(folder: Path, cache: Path) -> None:
    selection = select_tasks(("addition", "gsm8k"), folder, cache)

    assert selection.needs_builtin
    assert not selection.offline


@pytest.mark.parametrize(("typed", "meant"), [("adition", "addition"), ("gsm8", "gsm8k"), ("helaswag", "hellaswag")])
def test_an_unknown_task_is_told_with_the_closest(folder: Path, cache: Path, typed: str, meant: str) -> None:
    with pytest.raises(EvaluationError, match=f"a task '{typed}'; did you mean .*{meant}"):
        select_tasks((typed,), folder, cache)
