"""The tasks that lm-eval brings: which names there are, and which hub datasets they are made of.

lm-eval's own index parses its 14,000 files and takes 10 to 20 s. This one reads them as text and parses only those
that are asked for, in less than a second, so that a plan can be made with it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.harnesses.lm_eval.task_file import (
    Function,
    HubDataset,
    dataset_of,
    members_of,
    names_of,
    read_task_file,
    strings_in,
)

_NAMING = re.compile(r"""^["']?(?:task|group|tag)["']?\s*:[ \t]*(.*(?:\n[ \t]*(?:-.*|\#.*)?$)*)""", re.MULTILINE)
"""A `task`, `group` or `tag` of a file, with the lines of its list; tasks of a group are in it, too."""

_NAME = re.compile(r"[^\s\"'\[\],#]+")
_NO_TASKS = (".py", ".pyc", ".md", ".json", ".jsonl", ".csv", ".txt", ".zip")
_parsed = functools.cache(read_task_file)
_DATASET_PATH = re.compile(r"""DATASET_PATH\s*=\s*["']([^"']+)["']""")


def mentioned_names() -> Iterable[str]:
    """Every name that there may be; a few more than there are."""
    return _files_by_name().keys()


def is_installed(name: str) -> bool:
    """Whether lm-eval has a task, group or tag of that name."""
    return any(True for _ in defining(name))


def defining(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Files whose task, group or tag has that name; for a tag that a template gives, all files beside the template."""
    for file in _files_by_name().get(name, ()):
        config = _parsed(file)
        if name not in names_of(config):
            continue
        if isinstance(config.get("task") or config.get("group"), str):
            yield file, config
        else:
            yield from ((path, _parsed(path)) for path in sorted(file.parent.rglob("*.yaml")))


def hub_datasets(names: Iterable[str]) -> frozenset[HubDataset]:
    """The repositories that the tasks, groups and tags of these names take their samples from."""
    todo, seen = list(names), set()
    found: set[HubDataset] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for file, config in defining(name):
            todo += members_of(config)
            found |= set(_datasets(file, config))
    return frozenset(found)


def _datasets(file: Path, config: dict[str, Any]) -> Iterator[HubDataset]:
    """Of the file itself, else of the class that it names, else of those that it includes."""
    if own := dataset_of(config):
        yield own
    elif isinstance(config.get("class"), Function):
        code = (file.parent / config["class"].module_file).read_text(encoding="utf-8")
        yield from (HubDataset(path) for path in _DATASET_PATH.findall(code))
    elif "dataset_path" not in config:
        for included in strings_in(config.get("include")):
            path = file.parent / included
            yield from _datasets(path, _parsed(path))


@functools.cache
def _files_by_name() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for parent, _, files in os.walk(_folder()):
        for file in (file for file in files if not file.endswith(_NO_TASKS)):
            path = Path(parent, file)
            for naming in _NAMING.finditer(path.read_text(encoding="utf-8", errors="replace")):
                for name in _NAME.findall(naming[1]):
                    found.setdefault(name, []).append(path)
    return found


def _folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "tasks"
