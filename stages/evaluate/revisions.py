"""What the hub datasets of an evaluation hold now: part of its version, so that changed samples are scored anew."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from stages.core.errors import TransientError
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.tasks import hub_datasets, select_tasks
from stages.hubs.hub import Request
from stages.hubs.registry import hub_of
from stages.hubs.source import Source, repository

HUB_DATASETS = "hub_datasets"


def resolve_hub_datasets(config: EvaluateConfig) -> dict[str, JsonValue]:
    """`hub_datasets`: repository → commit. Empty, and nobody is asked, when all tasks are local.

    Raises EvaluationError for an unknown task or a bad task folder; DownloadError or TransientError when the hub does
    not tell.
    """
    datasets = hub_datasets(select_tasks(config.tasks, config.task_folder))
    if not datasets:
        return {}
    commits: dict[str, JsonValue] = {
        str(dataset): _commit_of(repository("hf", "dataset", dataset.repository, dataset.revision))
        for dataset in sorted(datasets, key=str)
    }
    return {HUB_DATASETS: commits}


def _commit_of(source: Source) -> str:
    return hub_of(source).resolve_revision(Request(source))


def check_loaded(tasks: Iterable[Any], outside: dict[str, JsonValue]) -> None:
    """Raise TransientError when a loaded task's samples are of another commit than the version says.

    tasks: of lm-eval. `datasets` keeps what it has prepared in a folder named after the commit.
    """
    expected = outside.get(HUB_DATASETS, {})
    assert isinstance(expected, dict)
    for task in tasks:
        revision = (task.config.dataset_kwargs or {}).get("revision")
        name = f"{task.DATASET_PATH}@{revision}" if revision else str(task.DATASET_PATH)
        commit = expected.get(name)
        if commit and not all(str(commit) in file.parts for file in _prepared_files(task)):
            raise TransientError(f"the dataset {name} changed after this refresh was planned; run it again")


def _prepared_files(task: Any) -> list[Path]:
    return [Path(file["filename"]) for split in task.dataset.values() for file in getattr(split, "cache_files", ())]
