"""An lm-eval task is found by name in the local folder or in lm-eval itself; unknown names are refused."""

from pathlib import Path

import pytest

from stages.core.errors import EvaluationError
from stages.harnesses.lm_eval import task_files
from stages.harnesses.lm_eval.tasks import hub_datasets, select_tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "addition.yaml").write_text(
        "task: addition\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
    )
    return folder


def test_local_tasks_need_neither_the_index_nor_a_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(task_files, "_files_by_name")
    selection = select_tasks(("addition",), folder)

    assert selection.offline
    assert not selection.needs_builtin
    assert hub_datasets(selection) == frozenset()


def test_builtin_and_local_tasks_go_together(folder: Path) -> None:
    selection = select_tasks(("addition", "gsm8k"), folder)

    assert selection.needs_builtin
    assert not selection.offline


@pytest.mark.parametrize(("typed", "meant"), [("adition", "addition"), ("gsm8", "gsm8k"), ("helaswag", "hellaswag")])
def test_an_unknown_task_is_told_with_the_closest(folder: Path, typed: str, meant: str) -> None:
    with pytest.raises(EvaluationError, match=f"a task '{typed}'; did you mean .*{meant}"):
        select_tasks((typed,), folder)


@pytest.mark.parametrize(
    ("name", "repositories"),
    [
        ("arc_easy", {"allenai/ai2_arc"}),
        ("mmlu", {"cais/mmlu"}),  # a group of groups, whose tasks include a template
        ("ai2_arc", {"allenai/ai2_arc"}),  # a tag
        ("gpqa", {"Idavidrein/gpqa"}),  # a tag of a template
        ("squadv2", {"lighteval/squad_v2"}),  # a class
    ],
)
def test_the_hub_datasets_of_a_task_are_found_whatever_it_is_made_of(name: str, repositories: set[str]) -> None:
    datasets = hub_datasets(select_tasks((name,), None))

    assert {dataset.repository for dataset in datasets} == repositories


def test_the_hub_datasets_of_a_task_folder_count_with_the_revisions_it_names(folder: Path) -> None:
    (folder / "own.yaml").write_text("task: own\ndataset_path: org/rows\ndataset_kwargs: {revision: v2}\n")
    (folder / "mixed.yaml").write_text("group: mixed\ntask: [own, arc_easy]\n")

    datasets = hub_datasets(select_tasks(("mixed",), folder))

    assert set(map(str, datasets)) == {"org/rows@v2", "allenai/ai2_arc"}
