"""One YAML file of lm-eval tasks, read without running what it names: names, members, datasets, code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from stages.core.yaml_bounds import check_bounds

FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, order=True)
class HubDataset:
    """A dataset repository of the Hugging Face hub. `revision`: what the task asks for; None is the default branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


class Function(str):
    """What a `!function module.name` tag says."""

    @property
    def module_file(self) -> str:
        """Where the function lies, relative to the file that names it."""
        return self.rpartition(".")[0].replace(".", "/") + ".py"


class _Loader(yaml.SafeLoader):
    """Knows the one tag that task files have."""


def _construct_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Function:
    return Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _construct_function)


def parse_task_file(text: str) -> Any:
    """What a task file says. Raises RecipeError for one that is not valid YAML, or that reading would not end of."""
    check_bounds(text, _Loader)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def read_task_file(file: Path) -> dict[str, Any]:
    """Its mapping; empty for a file that cannot be read: lm-eval itself says what is wrong when it runs the task."""
    try:
        config = parse_task_file(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def names_of(config: dict[str, Any]) -> Iterator[str]:
    """What the config may be called by: its task or group, and its tags."""
    yield from (config[key] for key in ("task", "group") if isinstance(config.get(key), str))
    yield from strings_in(config.get("tag"))


def members_of(config: dict[str, Any]) -> Iterator[str]:
    """Names of the tasks that a group consists of."""
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        yield member if isinstance(member, str) else str(member.get("task", member.get("group")))


def dataset_of(config: dict[str, Any]) -> HubDataset | None:
    """The repository that the config itself names; None for files of a known format, and where none is named."""
    path = config.get("dataset_path")
    if not isinstance(path, str) or path in FILE_FORMATS or not _REPOSITORY.fullmatch(path):
        return None
    return HubDataset(path, (config.get("dataset_kwargs") or {}).get("revision"))


def code_in(config: dict[str, Any]) -> Iterator[str]:
    """What the config would run outside a sandbox: `!function` tags, Jinja that reaches into Python's objects, and
    metrics that Hugging Face's `evaluate` loads as Python files.

    Jinja that hides what it does is stopped by the sandbox when it is rendered.
    """
    metrics = config.get("metric_list")
    for metric in metrics if isinstance(metrics, list) else ():
        if isinstance(metric, dict) and (metric.get("hf_evaluate") or "/" in str(metric.get("metric"))):
            yield f"the metric {metric.get('metric')} of Hugging Face's evaluate"
    for text in strings_in(config):
        if isinstance(text, Function):
            yield f"!function {text}"
        elif "__" in text and _reaches_into_python(text):
            yield f"the Jinja {text!r}"


def _reaches_into_python(template: str) -> bool:
    try:
        parsed = jinja2.Environment(autoescape=True).parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    return any(node.attr.startswith("__") for node in parsed.find_all(jinja2.nodes.Getattr))


def strings_in(tree: Any) -> Iterator[str]:
    """Every string in nested dicts (their values) and lists."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from strings_in(value)
