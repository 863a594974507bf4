"""Reading of lm-eval's task files, local or built-in, without running the code that they name.

A local folder's content is part of the evaluation's version, so all that a task is made of must lie in it: its YAML
files, the data files that they name, and the Python files that their `!function` tags name. lm-eval's own index parses
its 14,000 files in 10 to 20 s; this one parses only those asked for, in less than a second, for plans.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.core.errors import EvaluationError, RecipeError
from stages.core.yaml_bounds import check_bounds

FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, order=True)
class HubDataset:
    """Dataset repository of the Hugging Face hub, as a task names it. revision: None is the default branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


class Function(str):
    """Name of a Python function that a task file refers to by the tag `!function module.name`."""

    @property
    def module_file(self) -> str:
        """Python file that defines the function, as a path relative to the task file that names the function."""
        return self.rpartition(".")[0].replace(".", "/") + ".py"


class _Loader(yaml.SafeLoader):
    """YAML loader that knows the `!function` tag of task files."""


def _construct_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Function:
    return Function(loader.construct_scalar(node))


_Loader.add_constructor("!function", _construct_function)


def parse_task_file(text: str) -> Any:
    """Parse a task file's YAML. Raises RecipeError for invalid YAML, and for YAML that would take too long to read."""
    check_bounds(text, _Loader)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def read_task_file(file: Path) -> dict[str, Any]:
    """Return the content of a task file; empty if it cannot be read, since lm-eval reports that when it runs."""
    try:
        config = parse_task_file(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def names_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield the name of the lm-eval task or group that a task file's content defines, and its tags."""
    yield from (config[key] for key in ("task", "group") if isinstance(config.get(key), str))
    yield from strings_in(config.get("tag"))


def members_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tasks that belong to an lm-eval group, from its file's content."""
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        yield member if isinstance(member, str) else str(member.get("task", member.get("group")))


def dataset_of(config: dict[str, Any]) -> HubDataset | None:
    """Return the hub's dataset repository that a task file names; None for local files, and if it names none."""
    path = config.get("dataset_path")
    if not isinstance(path, str) or path in FILE_FORMATS or not _REPOSITORY.fullmatch(path):
        return None
    return HubDataset(path, (config.get("dataset_kwargs") or {}).get("revision"))


def code_in(config: dict[str, Any]) -> Iterator[str]:
    """Yield descriptions of the code that a task file would make lm-eval run outside a sandbox.

    That is `!function` tags, Jinja that reaches into Python's objects, and metrics that Hugging Face's `evaluate` loads
    as Python files. Jinja that hides what it does is stopped by the sandbox.
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
    import jinja2  # most plans see no such text

    try:
        parsed = jinja2.Environment(autoescape=True).parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    return any(node.attr.startswith("__") for node in parsed.find_all(jinja2.nodes.Getattr))


def strings_in(tree: Any) -> Iterator[str]:
    """Yield every string in nested lists and dicts (in their values)."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from strings_in(value)


@dataclass(frozen=True)
class TaskFolder:
    """Content of a folder with the user's own lm-eval tasks.

    names: tasks, groups and tags that it defines. hub_datasets: repositories of samples. members_elsewhere: tasks
    outside the folder in its groups. code: Python files, and other code that its tasks would run.
    """

    path: Path
    names: frozenset[str] = frozenset()
    hub_datasets: frozenset[HubDataset] = frozenset()
    members_elsewhere: frozenset[str] = frozenset()
    code: tuple[str, ...] = ()

    @property
    def uses_hub(self) -> bool:
        """Return whether a task in the user's folder needs datasets or other tasks from outside the folder."""
        return bool(self.hub_datasets or self.members_elsewhere)


def read_task_folder(path: Path) -> TaskFolder:
    """Read every task file in a folder. Raises EvaluationError for a bad file, and for one that names files outside."""
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
        code += [f"{file.relative_to(path)}: {piece}" for piece in code_in(config)]
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
    for function in (value for value in strings_in(config) if isinstance(value, Function)):
        _check_inside(file.parent / function.module_file, file, folder)
    return config


def _check_data_files(config: dict[str, Any], file: Path, folder: Path) -> None:
    """Check that a task's data files, and included YAML files (relative to their includer), lie in the folder."""
    arguments = config.get("dataset_kwargs") or {}
    for name in strings_in([arguments.get("data_files"), arguments.get("data_dir")]):
        if "://" in name:
            raise EvaluationError(f"{file} takes {name} from the network; put the file into {folder} and name it there")
        _check_inside(folder / name, file, folder)
    for name in strings_in(config.get("include")):
        _check_inside(file.parent / name, file, folder)


def _check_inside(path: Path, file: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise EvaluationError(f"{file} names {path}, which is outside the task folder {folder}; put the file into it")
    if "*" not in path.name and not path.exists():
        raise EvaluationError(f"{file} names {path}, which does not exist; paths of data files start at {folder}")


_NAMING = re.compile(r"""^["']?(?:task|group|tag)["']?\s*:[ \t]*(.*(?:\n[ \t]*(?:-.*|\#.*)?$)*)""", re.MULTILINE)
"""Pattern of a `task`, `group` or `tag` line in a task file, with the list after it that names a group's tasks."""

_NAME = re.compile(r"[^\s\"'\[\],#]+")
_NO_TASKS = (".py", ".pyc", ".md", ".json", ".jsonl", ".csv", ".txt", ".zip")
_parsed = functools.cache(read_task_file)
_DATASET_PATH = re.compile(r"""DATASET_PATH\s*=\s*["']([^"']+)["']""")


def mentioned_names() -> Iterable[str]:
    """Return all words in lm-eval's task files that may be names of tasks, to suggest the closest to a wrong name."""
    return _files_by_name().keys()


def is_installed(name: str) -> bool:
    """Return whether lm-eval itself has a task, group or tag of this name."""
    return any(True for _ in defining(name))


def defining(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield path and content of lm-eval's files that define a task, group or tag.

    Where a template has the tag, all files beside the template are yielded.
    """
    for file in map(Path, _files_by_name().get(name, ())):
        config = _parsed(file)
        if name not in names_of(config):
            continue
        if isinstance(config.get("task") or config.get("group"), str):
            yield file, config
        else:
            yield from ((path, _parsed(path)) for path in sorted(file.parent.rglob("*.yaml")))


def datasets_of(file: Path, config: dict[str, Any]) -> Iterator[HubDataset]:
    """Yield the datasets of an lm-eval task: those of its file, or else of its Python class or included files."""
    if own := dataset_of(config):
        yield own
    elif isinstance(config.get("class"), Function):
        code = (file.parent / config["class"].module_file).read_text(encoding="utf-8")
        yield from (HubDataset(path) for path in _DATASET_PATH.findall(code))
    elif "dataset_path" not in config:
        for included in strings_in(config.get("include")):
            path = file.parent / included
            yield from datasets_of(path, _parsed(path))


@functools.cache
def _files_by_name() -> dict[str, list[str]]:
    files_by_name: dict[str, list[str]] = {}
    for parent, _, files in os.walk(_folder()):
        for file in (file for file in files if not file.endswith(_NO_TASKS)):
            # For 14,000 files, `pathlib` and text streams would double the time of a plan.
            path = f"{parent}/{file}"
            with open(path, "rb", buffering=0) as content:  # noqa: PTH123
                text = content.read().decode("utf-8", errors="replace")
            for naming in _NAMING.finditer(text):
                for name in _NAME.findall(naming[1]):
                    files_by_name.setdefault(name, []).append(path)
    return files_by_name


def _folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "tasks"
