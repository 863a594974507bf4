"""Trainings whose rows or adapters cannot work, by what lies on this machine: found within seconds, as a plan is made.

Read are the first rows of datasets and the headers of a model's files. What takes longer, or has yet to be downloaded,
is left to the check of inputs, which reads every row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from safetensors import SafetensorError

from flows.planning.model_shape import download_of
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Index
from stages.adapters.named_layers import missing_layers
from stages.core.errors import DataError, LifecycleError, RecipeError
from stages.data.any_rows import PromptReader
from stages.data.bad_rows import check_first_rows
from stages.data.config import DataConfig
from stages.data.files import find_files
from stages.kinds.download.config import DownloadConfig
from stages.kinds.train.config import TrainConfig
from stages.models.model_config import CONFIG_FILE, read_config


def check_first_inputs(recipe: Recipe, will_run: Collection[str], outside: Outside, index: Index) -> None:
    """Raise RecipeError that lists what is wrong with the inputs of the trainings among these stages."""
    problems = [
        f"stages.{name}.{problem}"
        for name, config in recipe.stages.items()
        if name in will_run and isinstance(config, TrainConfig)
        for problem in [*_adapter(recipe, name, config, outside, index), *_rows(recipe, config, outside, index)]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _adapter(recipe: Recipe, name: str, config: TrainConfig, outside: Outside, index: Index) -> Iterator[str]:
    """Yield what the adapter names and the model lacks."""
    folder = _folder(recipe, download_of(recipe, name), outside, index) if config.adapter else None
    try:
        if config.adapter and folder and (folder / CONFIG_FILE).is_file():
            yield from missing_layers(config.adapter, read_config(folder), folder)
    except (LifecycleError, SafetensorError, OSError):  # the check of models says what is wrong with this one
        return


def _rows(recipe: Recipe, config: TrainConfig, outside: Outside, index: Index) -> Iterator[str]:
    """Yield what the first rows of each dataset show."""
    for place, part in config.data.parts.items():
        folder = _folder(recipe, part.dataset_stage, outside, index)
        for field, split in (("dataset", part.split), ("evaluation_split", part.evaluation_split)):
            if folder and split:
                try:
                    root, files = _files(folder, split)
                    check_first_rows(root, files, part, config.learning.rows, _reader(config, part))
                except DataError as error:
                    yield f"data.{place}{field}: {error}"
                except LifecycleError:  # the download says so itself
                    return


def _reader(config: TrainConfig, part: DataConfig) -> Callable[[object], object] | None:
    """Return what reads the prompts of a method that samples answers to them; None for rows that are learned from."""
    if not config.rollouts:
        return None
    return PromptReader(config.rollouts.reference, f"{config.method}.reference", part.columns).read


def _files(dataset: Path, split: str) -> tuple[Path, list[Path]]:
    """Return the folder and the files of a split. One file is the training split; of others the check finds it."""
    if dataset.is_file():
        return dataset.parent, [dataset] if split == "train" else []
    return dataset, find_files(dataset, split)


def _folder(recipe: Recipe, name: str, outside: Outside, index: Index) -> Path | None:
    """Return where a download's files lie on this machine now, in the store or at their source; None if they do not.

    A dataset may be one file. A selection of a folder's files is left to the check of inputs.
    """
    config = recipe.stages[name]
    if not isinstance(config, DownloadConfig) or name not in outside or config.stream:
        return None
    artifact = index.find(config.kind, version_of(identity_of(config, {}, outside[name])))
    if artifact and not artifact.damage:
        return artifact.folder / CONTENT_FOLDERS[config.product]
    # Headers are read however long hashing takes; rows of large files are left to the check with the rest of them.
    is_known = config.product == "model" or "revision" in outside[name]
    is_here = config.source.hub == "file" and config.files is None and is_known
    return Path(config.source.name) if is_here else None
