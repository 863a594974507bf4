"""Folders of local lm-eval tasks: their task names are found, and paths outside of the folder are refused."""

from pathlib import Path

import pytest

from stages.core.errors import EvaluationError
from stages.harnesses.lm_eval.task_files import read_task_folder

TASK = "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside.jsonl").write_text("{}\n")
    (tmp_path / "outside.py").write_text("")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "sums.yaml").write_text(TASK)
    return folder


def test_tasks_groups_and_tags_can_be_named(folder: Path) -> None:
    (folder / "more.yaml").write_text("include: sums.yaml\ntask: differences\ntag: [arithmetic, easy]\n")
    (folder / "group.yaml").write_text("group: all\ntask: [sums, differences]\n")

    found = read_task_folder(folder)

    assert found.names == {"sums", "differences", "arithmetic", "easy", "all"}
    assert not found.uses_hub


@pytest.mark.parametrize("text", ["task: hub\ndataset_path: openai/gsm8k\n", "group: mixed\ntask: [sums, gsm8k]\n"])
def test_tasks_that_need_a_hub_are_known_as_such(folder: Path, text: str) -> None:
    (folder / "other.yaml").write_text(text)

    assert read_task_folder(folder).uses_hub


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TASK.replace("rows.jsonl", "../outside.jsonl"), "outside the task folder"),
        (TASK.replace("rows.jsonl", "/etc/passwd"), "outside the task folder"),
        (TASK.replace("rows.jsonl", "missing.jsonl"), "does not exist"),
        (TASK.replace("rows.jsonl", "https://example.org/rows.jsonl"), "from the network"),
        (TASK.replace("{test: rows.jsonl}", "{test: [rows.jsonl, ../outside.jsonl]}"), "outside the task folder"),
        ("task: t\ninclude: ../sums.yaml\n", "outside the task folder"),
        ("task: t\nprocess_results: !function ..outside.score\n", "outside the task folder|does not exist"),
        ("task: t\nmetric_list: [{metric: !function os.system}]\n", "does not exist"),
        ("task: [unclosed\n", "no readable YAML"),
        ("- a list\n", "expected the mapping"),
    ],
)
def test_what_reaches_outside_or_is_broken_is_named_with_its_file(folder: Path, text: str, message: str) -> None:
    (folder / "bad.yaml").write_text(text)

    with pytest.raises(EvaluationError, match=message) as caught:
        read_task_folder(folder)

    assert str(folder / "bad.yaml") in str(caught.value)


def test_a_link_outside_is_refused(folder: Path) -> None:
    (folder / "linked.jsonl").symlink_to(folder.parent / "outside.jsonl")

    with pytest.raises(EvaluationError, match=r"linked\.jsonl is a link to .*outside\.jsonl"):
        read_task_folder(folder)


def test_functions_of_the_folder_are_known_as_code_and_not_run(folder: Path) -> None:
    (folder / "scoring.py").write_text("raise SystemExit('was imported')\n")
    (folder / "own.yaml").write_text("task: own\nprocess_results: !function scoring.score\n")

    found = read_task_folder(folder)

    assert "own" in found.names
    assert found.code == ("scoring.py", "own.yaml: !function scoring.score")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('doc_to_text: "{{question}} {{_id}}"', None),
        ('doc_to_text: "{{question.strip()[:-1]}} ____."', None),
        ('doc_to_text: "{{question.__class__.__mro__}}"', "the Jinja '{{question.__class__.__mro__}}'"),
        ('doc_to_target: ["{% set a = cycler.__init__ %}"]', "the Jinja '{% set a = cycler.__init__ %}'"),
        ("metric_list: [{metric: exact_match}]", None),
        ("metric_list: [{metric: bleu, hf_evaluate: true}]", "the metric bleu of Hugging Face's evaluate"),
        ("metric_list: [{metric: ./own}]", "the metric ./own of Hugging Face's evaluate"),
    ],
)
def test_what_a_task_would_run_outside_a_sandbox_is_known(folder: Path, text: str, code: str | None) -> None:
    (folder / "own.yaml").write_text(f"task: own\n{text}\n")

    assert read_task_folder(folder).code == ((f"own.yaml: {code}",) if code else ())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"there is no task folder .*nowhere"):
        read_task_folder(tmp_path / "nowhere")
