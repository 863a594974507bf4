"""A folder of local lm-eval tasks: which names it defines, and that nothing in it reaches outside.

The folder's content is part of the evaluation's version, so all that a task is made of must lie in it: its YAML files,
the data files that they name, and the Python files that their `!function` tags name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stages.errors import EvaluationError

FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")


@dataclass(frozen=True)
class TaskFolder:
    """names: tasks, groups and tags that it defines. uses_hub: whether any of them needs more than the folder."""

    path: Path
    names: frozenset[str] = field(default_factory=frozenset)
    uses_hub: bool = False


class _Function(str):
    """What a `!function module.name` tag says."""


class _Loader(yaml.SafeLoader):
    """Reads task YAML without importing what its `!function` tags name."""


def _construct_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> _Function:
    return _Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _construct_function)


def read_task_folder(path: Path) -> TaskFolder:
    """Read every YAML file of `path`. Raises EvaluationError for a bad file, or for one that reaches outside."""
    if not path.is_dir():
        raise EvaluationError(f"there is no task folder {path}; expected a folder with YAML files of lm-eval tasks")
    _refuse_links_outside(path)
    configs = [_read_config(file, path) for file in sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])]
    names = frozenset(name for config in configs for name in _names(config))
    members = {name for config in configs for name in _members(config)}
    sources = {config["dataset_path"] for config in configs if "dataset_path" in config}
    return TaskFolder(path, names, uses_hub=not (members <= names and sources <= set(FILE_FORMATS)))


def _refuse_links_outside(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise EvaluationError(
                f"{path} is a link to {path.resolve()}, outside the task folder; put the file itself there, "
                "so that the evaluation's version holds its content"
            )


def _read_config(file: Path, folder: Path) -> dict[str, Any]:
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{file} is no readable YAML: {error}") from error
    if not isinstance(config, dict):
        raise EvaluationError(f"{file} holds a {type(config).__name__}; expected the mapping of an lm-eval task")
    _check_data_files(config, file, folder)
    _check_functions(config, file, folder)
    return config


def _check_data_files(config: dict[str, Any], file: Path, folder: Path) -> None:
    """Data files are named relative to the task folder, and exist there; so are included YAML files, to their own."""
    arguments = config.get("dataset_kwargs") or {}
    for name in _strings([arguments.get("data_files"), arguments.get("data_dir")]):
        if "://" in name:
            raise EvaluationError(f"{file} takes {name} from the network; put the file into {folder} and name it there")
        _check_inside(folder / name, file, folder)
    for name in _strings(config.get("include")):
        _check_inside(file.parent / name, file, folder)


def _check_functions(config: dict[str, Any], file: Path, folder: Path) -> None:
    for function in (value for value in _strings(config) if isinstance(value, _Function)):
        module = function.rpartition(".")[0].replace(".", "/")
        _check_inside(file.parent / f"{module}.py", file, folder)


def _check_inside(path: Path, file: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise EvaluationError(f"{file} names {path}, which is outside the task folder {folder}; put the file into it")
    if "*" not in path.name and not path.exists():
        raise EvaluationError(f"{file} names {path}, which does not exist; paths of data files start at {folder}")


def _names(config: dict[str, Any]) -> Iterator[str]:
    """What the config may be called by: its task or group, and its tags."""
    yield from (config[key] for key in ("task", "group") if isinstance(config.get(key), str))
    yield from _strings(config.get("tag"))


def _members(config: dict[str, Any]) -> Iterator[str]:
    """Names of the tasks that a group consists of."""
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        yield member if isinstance(member, str) else str(member.get("task", member.get("group")))


def _strings(tree: Any) -> Iterator[str]:
    """Every string in nested dicts (their values) and lists."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _strings(value)
