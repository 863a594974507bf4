"""A folder of local lm-eval tasks: which names it defines, and that nothing in it reaches outside.

The folder's content is part of the evaluation's version, so all that a task is made of must lie in it: its YAML files,
the data files that they name, and the Python files that their `!function` tags name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.core.errors import EvaluationError, RecipeError
from stages.harnesses.lm_eval.task_file import (
    Function,
    HubDataset,
    code_in,
    dataset_of,
    members_of,
    names_of,
    parse_task_file,
    strings_in,
)


@dataclass(frozen=True)
class TaskFolder:
    """names: tasks, groups and tags that it defines. code: its Python files, and what else its tasks would run.

    What lies elsewhere: the repositories whose samples its tasks take, and the tasks of others that its groups have.
    """

    path: Path
    names: frozenset[str] = frozenset()
    hub_datasets: frozenset[HubDataset] = frozenset()
    members_elsewhere: frozenset[str] = frozenset()
    code: tuple[str, ...] = ()

    @property
    def uses_hub(self) -> bool:
        """Whether any of its tasks needs more than the folder."""
        return bool(self.hub_datasets or self.members_elsewhere)


def read_task_folder(path: Path) -> TaskFolder:
    """Read every YAML file of `path`. Raises EvaluationError for a bad file, or for one that reaches outside."""
    if not path.is_dir():
        raise EvaluationError(f"there is no task folder {path}; expected a folder with YAML files of lm-eval tasks")
    _refuse_links_outside(path)
    files = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
    configs = [_read_config(file, path) for file in files]
    names = frozenset(name for config in configs for name in names_of(config))
    members = frozenset(name for config in configs for name in members_of(config))
    datasets = frozenset(dataset for config in configs if (dataset := dataset_of(config)))
    code = [str(file.relative_to(path)) for file in sorted(path.rglob("*.py"))]
    for file, config in zip(files, configs, strict=True):
        code += [f"{file.relative_to(path)}: {one}" for one in code_in(config)]
    return TaskFolder(path, names, datasets, members - names, tuple(code))


def _refuse_links_outside(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise EvaluationError(
                f"{path} is a link to {path.resolve()}, outside the task folder; put the file itself there, "
                "so that the evaluation's version holds its content"
            )


def _read_config(file: Path, folder: Path) -> dict[str, Any]:
    try:
        config = parse_task_file(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecipeError) as error:
        raise EvaluationError(f"{file} is no readable YAML: {error}") from error
    if not isinstance(config, dict):
        raise EvaluationError(f"{file} holds a {type(config).__name__}; expected the mapping of an lm-eval task")
    _check_data_files(config, file, folder)
    _check_functions(config, file, folder)
    return config


def _check_data_files(config: dict[str, Any], file: Path, folder: Path) -> None:
    """Data files are named relative to the task folder, and exist there; so are included YAML files, to their own."""
    arguments = config.get("dataset_kwargs") or {}
    for name in strings_in([arguments.get("data_files"), arguments.get("data_dir")]):
        if "://" in name:
            raise EvaluationError(f"{file} takes {name} from the network; put the file into {folder} and name it there")
        _check_inside(folder / name, file, folder)
    for name in strings_in(config.get("include")):
        _check_inside(file.parent / name, file, folder)


def _check_functions(config: dict[str, Any], file: Path, folder: Path) -> None:
    for function in (value for value in strings_in(config) if isinstance(value, Function)):
        _check_inside(file.parent / function.module_file, file, folder)


def _check_inside(path: Path, file: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise EvaluationError(f"{file} names {path}, which is outside the task folder {folder}; put the file into it")
    if "*" not in path.name and not path.exists():
        raise EvaluationError(f"{file} names {path}, which does not exist; paths of data files start at {folder}")
