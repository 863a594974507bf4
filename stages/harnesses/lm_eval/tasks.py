"""lm-eval tasks that a recipe names: their files, their datasets, and the scores that they give.

The commits of hub datasets are part of an evaluation's version, so that changed samples are scored again.
"""

import difflib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from stages.core.cache import note_use_of_file
from stages.core.errors import DataError, EvaluationError, TransientError
from stages.data.files import Row, read_rows
from stages.data.messages import RowError
from stages.harnesses.lm_eval import task_files
from stages.harnesses.lm_eval.task_files import (
    Function,
    HubDataset,
    TaskFolder,
    members_of,
    names_of,
    read_task_file,
    read_task_folder,
    strings_in,
)
from stages.harnesses.pictures import check_numbers, flat
from stages.harnesses.scores import NO_FILTER
from stages.hubs.answers import BackgroundLookups
from stages.hubs.hub import Request, repository
from stages.hubs.registry import hub_of
from stages.models.media import KINDS, MediaKind

HUB_DATASETS = "hub_datasets"


DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
"""Metrics of a task that names none, by output type: lm-eval's `DEFAULT_METRIC_REGISTRY`, a slow import."""
GENERATES = "generate_until"
STANDARD_ERROR = "_stderr"
MAX_INCLUDES = 10
CHANGING = {"custom_dataset", "process_docs"}
"""Fields of a task with code that makes or changes its rows."""
READ_S = 1.0
"""Processor seconds allowed for reading rows of tasks with media while a refresh is planned."""


@dataclass(frozen=True)
class TaskSelection:
    """Selected lm-eval tasks. needs_builtin: lm-eval's own must be indexed, which takes it 10 s or more."""

    names: tuple[str, ...]
    folder: TaskFolder | None
    needs_builtin: bool

    @property
    def offline(self) -> bool:
        return not self.needs_builtin and self.folder is not None and not self.folder.uses_hub


def select_tasks(names: tuple[str, ...], folder: Path | None) -> TaskSelection:
    """Find the lm-eval tasks that a recipe names, in the user's task folder or among lm-eval's own.

    Raises EvaluationError for a bad folder, and for an unknown name, with the closest names.
    """
    local = read_task_folder(folder) if folder else None
    known_locally = local.names if local else frozenset()
    elsewhere = [name for name in names if name not in known_locally]
    if elsewhere:
        _check_known(elsewhere, known_locally, folder)
    return TaskSelection(names, local, needs_builtin=bool(elsewhere) or bool(local and local.uses_hub))


def check_trusted(selection: TaskSelection) -> None:
    """Raise EvaluationError if the task folder has code, for a recipe that does not say `trust_task_code: true`."""
    if selection.folder and selection.folder.code:
        raise EvaluationError(
            f"the task folder {selection.folder.path} has code that would run with all rights of this user: "
            f"{'; '.join(selection.folder.code)}. Read it, then say `trust_task_code: true`, or remove it"
        )


def hub_datasets(selection: TaskSelection) -> frozenset[HubDataset]:
    """Return the dataset repositories from which the selected tasks and all tasks in the user's folder take samples."""
    local = selection.folder or TaskFolder(Path())
    elsewhere = {*selection.names, *local.members_elsewhere} - local.names
    defining = _defining(elsewhere, folder=None)
    return local.hub_datasets.union(*(task_files.datasets_of(file, config) for file, config in defining))


def _check_known(names: Iterable[str], known_locally: Collection[str], folder: Path | None) -> None:
    for name in names:
        if not task_files.is_installed(name):
            known = [*known_locally, *task_files.mentioned_names()]
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            where = f"neither {folder} nor lm-eval has" if folder else "lm-eval does not have"
            meant = f"did you mean {' or '.join(close)}?" if close else "see `lm-eval ls tasks` for those that it has"
            raise EvaluationError(f"{where} a task {name!r}; {meant}")


def resolve_hub_datasets(selection: TaskSelection, limit_s: float | None = None) -> dict[str, JsonValue]:
    """Return the tasks' current commits on the hub, as {`hub_datasets`: {repository: commit}}; {} if all are local.

    Raises DownloadError or TransientError if the hub gives no answer.
    """
    datasets = {str(dataset): dataset for dataset in sorted(hub_datasets(selection), key=str)}
    answers = BackgroundLookups[str](limit_s)
    for name, dataset in datasets.items():
        source = repository("hf", "dataset", dataset.repository, dataset.revision)
        answers.ask(name, partial(hub_of(source).resolve_revision, Request(source, limit_s=limit_s)))
    commits: dict[str, JsonValue] = {name: answers.of(name) for name in datasets}
    return {HUB_DATASETS: commits} if commits else {}


def check_loaded(tasks: Iterable[Any], outside: dict[str, JsonValue], kept: Path) -> None:
    """Raise TransientError if a task's dataset on the hub has changed since the run was planned.

    kept: folder of `datasets`, which names prepared data after the commit; their use is noted.
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


def may_give(score: str, names: Iterable[str], folder: Path | None) -> bool:
    """Return whether tasks, groups or tags can produce the score `TASK.METRIC` or `TASK.FILTER.METRIC`.

    True where files do not tell: scores of groups, of tasks written in Python, of tasks that do not exist.
    """
    return any(
        score.startswith(f"{task}.") and _gives(file, config, score, task)
        for file, config in _defining(names, folder)
        for task in _titles(config)
    )


def log_likelihood_tasks(names: Iterable[str], folder: Path | None) -> list[str]:
    """Return the tasks that need log-likelihoods of given texts, as far as their files say so."""
    return sorted(
        task
        for file, config in _defining(names, folder)
        if _with_includes(file, config, MAX_INCLUDES).get("output_type", GENERATES) != GENERATES
        for task in _titles(config)
    )


def media_columns(get_field: Callable[[str], Any]) -> dict[MediaKind, list[Any]]:
    """Return what names the media of a task's questions, such as columns, by kind. get_field: of the task's config."""
    video = _mapping(get_field("metadata")).get("doc_to_video")
    named = {"image": get_field("doc_to_image"), "video": video, "audio": get_field("doc_to_audio")}
    return {kind: one if isinstance(one, list) else [one] for kind in KINDS if (one := named[kind])}


def data_files(get_field: Callable[[str], Any], folder: Path | None) -> Iterator[Path]:
    """Yield the data files of the split that is evaluated, if they are in the task folder. get_field: as above."""
    named = _mapping(get_field("dataset_kwargs")).get("data_files")
    split = get_field("test_split") or get_field("validation_split")
    for name in strings_in(named.get(str(split)) if isinstance(named, dict) else named):
        if folder and (folder / name).is_file():
            yield folder / name


def too_many_media(names: Collection[str], folder: Path, most: int, limit: int | None) -> Iterator[str]:
    """Yield a problem for each task whose first rows show a question with more than `most` media of a kind.

    The rows are those in the task folder, read for `READ_S`. A task whose rows code or templates change, or that come
    from elsewhere, is left to the evaluation.
    """
    ends_s = time.process_time() + READ_S
    for file, config in _defining(names, folder):
        whole = _with_includes(file, config, MAX_INCLUDES)
        columns = media_columns(whole.get)
        # A group's members may have other options there than in their files.
        is_named = not {*names}.isdisjoint(names_of(config))
        is_plain = all(_is_column(one) for listed in columns.values() for one in listed)
        if not is_named or not is_plain or CHANGING & whole.keys():
            continue
        rows = islice(read_rows(folder, [*data_files(whole.get, folder)] if columns else []), limit)
        with suppress(DataError, OSError):  # of a file that the evaluation's own check names
            for row in takewhile(lambda _: time.process_time() < ends_s, rows):
                cells = row.content if isinstance(row, Row) and isinstance(row.content, dict) else {}
                media = {kind: [*flat([cells.get(one) for one in listed])] for kind, listed in columns.items()}
                try:
                    check_numbers({kind: len(listed) for kind, listed in media.items()}, most)
                except RowError as error:
                    yield f"the task {whole.get('task')}: {row.place} {error}"
                    break


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_column(named: object) -> bool:
    return isinstance(named, str) and not isinstance(named, Function) and "{" not in named


def metrics_of_tasks(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """Return the metrics that the named tasks in the user's folder ask lm-eval for, by task."""
    local = {file for file, _ in _local_tasks(folder)}
    metrics_by_task: dict[str, list[str]] = {}
    for file, config in _defining(names, folder):
        whole = _with_includes(file, config, MAX_INCLUDES)
        listed = whole.get("metric_list")
        if file in local and isinstance(listed, list) and "process_results" not in whole:
            metrics = [entry.get("metric") for entry in listed if isinstance(entry, dict)]
            named = [metric for metric in metrics if isinstance(metric, str) and not isinstance(metric, Function)]
            metrics_by_task |= dict.fromkeys(_titles(config), named)
    return metrics_by_task


def _defining(names: Iterable[str], folder: Path | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield file and content of the tasks, groups and tags with these names, and of the groups' members."""
    local = _local_tasks(folder) if folder else []
    todo, seen = [*names], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = [(file, config) for file, config in local if name in names_of(config)]
        for file, config in found or [*task_files.defining(name)] or [(Path(), {"task": name, "class": ""})]:
            todo += members_of(config)
            yield file, config


def _titles(config: dict[str, Any]) -> list[str]:
    return [config[key] for key in ("task", "group") if isinstance(config.get(key), str)]


def _gives(file: Path, config: dict[str, Any], score: str, task: str) -> bool:
    config = _with_includes(file, config, MAX_INCLUDES)
    if "class" in config or "group" in config:
        return True
    filters = [str(entry.get("name")) for entry in config.get("filter_list") or ()] or [NO_FILTER]
    rest = score.removeprefix(f"{task}.").removesuffix(STANDARD_ERROR)
    return any(
        rest == (metric if name == NO_FILTER else f"{name}.{metric}") for name in filters for metric in _metrics(config)
    )


def _metrics(config: dict[str, Any]) -> list[str]:
    listed = config.get("metric_list") or [
        {"metric": metric} for metric in DEFAULT_METRICS.get(config.get("output_type", "generate_until"), ())
    ]
    return [str(entry.get("metric")).rpartition(".")[2] for entry in listed]  # a function gives its own name


def _with_includes(file: Path, config: dict[str, Any], num_left: int) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name in strings_in(config.get("include")) if num_left else ():
        included = file.parent / name
        whole |= _with_includes(included, read_task_file(included), num_left - 1)
    return whole | config


def _local_tasks(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    # A pipe would be waited for, and a device read without end; the plan refuses both by name.
    files = (file for pattern in ("*.yaml", "*.yml") for file in sorted(folder.rglob(pattern)) if file.is_file())
    return [(file, read_task_file(file)) for file in files]
