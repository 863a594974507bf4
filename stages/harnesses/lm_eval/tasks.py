"""Finds the tasks that a recipe names, in its task folder and among those that lm-eval brings, before anything slow."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import EvaluationError
from stages.harnesses.lm_eval import installed_tasks
from stages.harnesses.lm_eval.task_file import HubDataset
from stages.harnesses.lm_eval.task_folder import TaskFolder, read_task_folder


@dataclass(frozen=True)
class TaskSelection:
    """names: what to run. needs_builtin: whether lm-eval's own tasks must be indexed, which takes it 10 s or more."""

    names: tuple[str, ...]
    folder: TaskFolder | None
    needs_builtin: bool

    @property
    def offline(self) -> bool:
        """Whether everything lies in the task folder, so that no hub need be asked."""
        return not self.needs_builtin and self.folder is not None and not self.folder.uses_hub


def select_tasks(names: tuple[str, ...], folder: Path | None) -> TaskSelection:
    """Raises EvaluationError for an unknown name, with the closest ones, and for a bad task folder."""
    local = read_task_folder(folder) if folder else None
    known_locally = local.names if local else frozenset()
    elsewhere = [name for name in names if name not in known_locally]
    if elsewhere:
        _check_known(elsewhere, known_locally, folder)
    return TaskSelection(names, local, needs_builtin=bool(elsewhere) or bool(local and local.uses_hub))


def check_trusted(selection: TaskSelection) -> None:
    """Raise EvaluationError for a task folder with code of its own, which the recipe has not said to trust."""
    if selection.folder and selection.folder.code:
        raise EvaluationError(
            f"the task folder {selection.folder.path} has code that would run with all rights of this user: "
            f"{'; '.join(selection.folder.code)}. Read it, then say `trust_task_code: true`, or remove it"
        )


def hub_datasets(selection: TaskSelection) -> frozenset[HubDataset]:
    """The repositories of the hub that the selected tasks, and those of the task folder, take their samples from."""
    local = selection.folder or TaskFolder(Path())
    elsewhere = {*selection.names, *local.members_elsewhere} - local.names
    return local.hub_datasets | (installed_tasks.hub_datasets(elsewhere) if elsewhere else frozenset())


def _check_known(names: Iterable[str], known_locally: Collection[str], folder: Path | None) -> None:
    for name in names:
        if not installed_tasks.is_installed(name):
            known = [*known_locally, *installed_tasks.mentioned_names()]
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            where = f"neither {folder} nor lm-eval has" if folder else "lm-eval does not have"
            meant = f"did you mean {' or '.join(close)}?" if close else "see `lm-eval ls tasks` for those that it has"
            raise EvaluationError(f"{where} a task {name!r}; {meant}")
