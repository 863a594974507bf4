"""Which scores lm-eval's tasks give, and which need log-likelihoods, by what their files say: asked before a gate waits
for a score for hours, or a server is asked for what it does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.harnesses.lm_eval import installed_tasks
from stages.harnesses.lm_eval.task_file import Function, members_of, names_of, read_task_file, strings_in
from stages.harnesses.scores import NO_FILTER

DEFAULT_METRICS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
"""Of a task that names none: lm-eval's `DEFAULT_METRIC_REGISTRY`, whose import takes seconds."""
GENERATES = "generate_until"
STANDARD_ERROR = "_stderr"
MAX_INCLUDES = 10


def may_give(score: str, names: Iterable[str], folder: Path | None) -> bool:
    """Whether one of the tasks, groups and tags of these names may give `TASK.METRIC` or `TASK.FILTER.METRIC`.

    True for what cannot be known from files: scores of groups, of tasks written in Python, of tasks that do not exist.
    """
    return any(
        score.startswith(f"{task}.") and _gives(file, config, score, task)
        for file, config in _defining(names, folder)
        for task in _titles(config)
    )


def log_likelihood_tasks(names: Iterable[str], folder: Path | None) -> list[str]:
    """Those of the tasks that compare or sum log-likelihoods of given texts. Tasks written in Python may, unnoticed."""
    return sorted(
        task
        for file, config in _defining(names, folder)
        if _with_includes(file, config, MAX_INCLUDES).get("output_type", GENERATES) != GENERATES
        for task in _titles(config)
    )


def metrics_of_tasks(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """Return the metrics that each of the folder's own tasks among these asks lm-eval for, by name."""
    local = {file for file, _ in _local_tasks(folder)}
    found: dict[str, list[str]] = {}
    for file, config in _defining(names, folder):
        whole = _with_includes(file, config, MAX_INCLUDES)
        listed = whole.get("metric_list")
        if file in local and isinstance(listed, list) and "process_results" not in whole:
            metrics = [entry.get("metric") for entry in listed if isinstance(entry, dict)]
            named = [metric for metric in metrics if isinstance(metric, str) and not isinstance(metric, Function)]
            found |= dict.fromkeys(_titles(config), named)
    return found


def _defining(names: Iterable[str], folder: Path | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """File and content of the tasks, groups and tags of these names, and of their members."""
    local = _local_tasks(folder) if folder else []
    todo, seen = [*names], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = [(file, config) for file, config in local if name in names_of(config)]
        for file, config in found or [*installed_tasks.defining(name)] or [(Path(), {"task": name, "class": ""})]:
            todo += members_of(config)
            yield file, config


def _titles(config: dict[str, Any]) -> list[str]:
    return [config[key] for key in ("task", "group") if isinstance(config.get(key), str)]


def _gives(file: Path, config: dict[str, Any], score: str, task: str) -> bool:
    config = _with_includes(file, config, MAX_INCLUDES)
    if "class" in config or "group" in config:
        return True
    filters = [str(one.get("name")) for one in config.get("filter_list") or ()] or [NO_FILTER]
    rest = score.removeprefix(f"{task}.").removesuffix(STANDARD_ERROR)
    return any(
        rest == (metric if name == NO_FILTER else f"{name}.{metric}") for name in filters for metric in _metrics(config)
    )


def _metrics(config: dict[str, Any]) -> list[str]:
    listed = config.get("metric_list") or [
        {"metric": metric} for metric in DEFAULT_METRICS.get(config.get("output_type", "generate_until"), ())
    ]
    return [str(one.get("metric")).rpartition(".")[2] for one in listed]  # a function gives its own name


def _with_includes(file: Path, config: dict[str, Any], num_left: int) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name in strings_in(config.get("include")) if num_left else ():
        included = file.parent / name
        whole |= _with_includes(included, read_task_file(included), num_left - 1)
    return whole | config


def _local_tasks(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(file, read_task_file(file)) for pattern in ("*.yaml", "*.yml") for file in sorted(folder.rglob(pattern))]
