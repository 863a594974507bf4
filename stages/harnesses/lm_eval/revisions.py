"""What the hub datasets of an evaluation hold now: part of its version, so that changed samples are scored again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from stages.core.cache_entries import note_use_of_file
from stages.core.errors import TransientError
from stages.harnesses.lm_eval.tasks import TaskSelection, hub_datasets
from stages.hubs.answers import Answers
from stages.hubs.hub import Request
from stages.hubs.registry import hub_of
from stages.hubs.source import repository

HUB_DATASETS = "hub_datasets"


def resolve_hub_datasets(selection: TaskSelection, limit_s: float | None = None) -> dict[str, JsonValue]:
    """`hub_datasets`: repository → commit. Empty, and no hub is asked, when all tasks are local.

    Raises DownloadError or TransientError when the hub gives no answer.
    """
    datasets = {str(dataset): dataset for dataset in sorted(hub_datasets(selection), key=str)}
    answers = Answers[str](limit_s)
    for name, dataset in datasets.items():
        source = repository("hf", "dataset", dataset.repository, dataset.revision)
        answers.ask(name, partial(hub_of(source).resolve_revision, Request(source, limit_s=limit_s)))
    commits: dict[str, JsonValue] = {name: answers.of(name) for name in datasets}
    return {HUB_DATASETS: commits} if commits else {}


def check_loaded(tasks: Iterable[Any], outside: dict[str, JsonValue], kept: Path) -> None:
    """Raise TransientError when a loaded task's samples are of another commit than the version says.

    tasks: of lm-eval. kept: the folder of `datasets`, which keeps what it has prepared in folders named after the
    commit; their use is noted.
    """
    expected = outside.get(HUB_DATASETS, {})
    assert isinstance(expected, dict)
    for task in tasks:
        revision = (task.config.dataset_kwargs or {}).get("revision")
        name = f"{task.DATASET_PATH}@{revision}" if revision else str(task.DATASET_PATH)
        commit = expected.get(name)
        files = [file for split in task.dataset.values() for file in getattr(split, "cache_files", ())]
        for file in files:
            note_use_of_file(kept, Path(file["filename"]))
        if commit and not all(str(commit) in Path(file["filename"]).parts for file in files):
            raise TransientError(f"the dataset {name} changed after this refresh was planned; run it again")
