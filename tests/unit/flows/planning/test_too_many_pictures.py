"""Questions with more pictures than a server takes are refused when the refresh is planned, where rows are here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import LifecycleError, RecipeError
from stages.harnesses.lm_eval.tasks import too_many_media

CONFIGS = Path(__file__).parents[4] / "configs"
TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: colors.jsonl}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
ROWS = [
    {"question": "Which?", "images": ["a.png"], "answer": "red"},
    {"question": "Which?", "images": ["a.png", "b.png"], "answer": "blue"},
]


def written(folder: Path, fields: str = "doc_to_image: [images]", rows: object = ROWS) -> Path:
    (folder / "colors.yaml").write_text(TASK + fields + "\n")
    lines = [json.dumps(row) + "\n" for row in rows] if isinstance(rows, list) else [rows]
    (folder / "colors.jsonl").write_text("".join(map(str, lines)))
    return folder


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")

    def run(evaluation: str, changes: dict[str, dict[str, Any]]) -> None:
        tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
        del tree["stages"]["promote"]
        tree["stages"][evaluation]["tasks"] = ["colors"]
        for stage, change in changes.items():
            tree["stages"][stage] |= change
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        make_plan(RefreshRequest(str(tmp_path / "recipe.yaml")))

    return run


@pytest.mark.parametrize(
    ("evaluation", "stage", "end"),
    [("evaluate-awq", "serve", " of the stage serve"), ("evaluate-dpo", "evaluate-dpo", "")],
)
def test_a_plan_names_the_row_and_the_setting(
    plan: Callable[..., Any], tmp_path: Path, evaluation: str, stage: str, end: str
) -> None:
    written(tmp_path / "tasks")
    with pytest.raises(RecipeError) as error:
        plan(evaluation, {stage: {"serving": {"max_images": 1}}})
    assert str(error.value) == (
        f"stages.{evaluation}.tasks: the task colors: colors.jsonl:2 has 2 pictures, and the server takes at most 1 in "
        f"one request; raise `serving.max_images`{end}"
    )
    plan(evaluation, {stage: {"serving": {"max_images": 2}}})
    plan(evaluation, {stage: {"serving": {"max_images": 1}}, evaluation: {"limit": 1}} if stage == "serve" else {})


def test_without_the_setting_four_are_taken(plan: Callable[..., Any], tmp_path: Path) -> None:
    written(tmp_path / "tasks", rows=[{**ROWS[0], "images": ["a.png"] * 5}])
    with pytest.raises(RecipeError, match="has 5 pictures, and the server takes at most 4 in one request"):
        plan("evaluate-awq", {})


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ("", ROWS),
        ("doc_to_image: '{{images}}'", ROWS),
        ("doc_to_image: !function colors.images", ROWS),
        ("doc_to_image: [images]\nprocess_docs: !function colors.rows", ROWS),
        ("doc_to_image: [[images]]", ROWS),
        ("doc_to_image: {images: 1}", ROWS),
        ("doc_to_image: [images]\ndataset_kwargs: {data_files: {validation: colors.jsonl}}", ROWS),
        ("doc_to_image: [images]\ndataset_kwargs: {data_files: gone.jsonl}", ROWS),
        ("doc_to_image: [images]\ndataset_kwargs: [3]", ROWS),
        ("doc_to_image: [images]\nmetadata: 1.0\ndataset_path: someone/colors\ndataset_kwargs: null", ROWS),
        ("doc_to_image: [pictures]", ROWS),
        ("doc_to_image: [images]", "no JSON\n[1]\n3\n"),
        ("doc_to_image: [images]", b"\xff"),
        ("doc_to_image: images", [{"images": None}, {"images": "a.png"}, {"images": {"bytes": ""}}]),
    ],
)
def test_what_files_do_not_tell_is_left_to_the_evaluation(tmp_path: Path, fields: str, rows: object) -> None:
    written(tmp_path, fields, rows)
    if isinstance(rows, bytes):
        (tmp_path / "colors.jsonl").write_bytes(rows)
    assert list(too_many_media(["colors"], tmp_path, 1, None)) == []


def test_videos_and_nested_lists_count(tmp_path: Path) -> None:
    written(tmp_path, "metadata: {doc_to_video: films}", [{"films": [["a.mp4"], ["b.mp4", None]]}])
    (problem,) = too_many_media(["colors"], tmp_path, 1, None)
    assert "colors.jsonl:1 has 2 videos" in problem


def test_files_that_are_gone_are_named_as_before(plan: Callable[..., Any], tmp_path: Path) -> None:
    (written(tmp_path / "tasks") / "colors.jsonl").unlink()
    with pytest.raises(LifecycleError, match=r"colors\.jsonl, which does not exist"):
        plan("evaluate-awq", {"serve": {"serving": {"max_images": 1}}})
    with pytest.raises(LifecycleError, match="task_folder: there is no file or folder"):
        plan("evaluate-awq", {"evaluate-awq": {"task_folder": str(tmp_path / "gone")}})
