"""Models, chat templates and rows on this machine, checked against the trainings that use them as a plan is made.

Reads configs, headers of weights and the first rows of datasets: seconds at most, before anything is copied. What is
only on a hub is checked after its download, by the same functions; the check of inputs then reads every row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flows.planning.devices import GPU, sees_gpus
from flows.planning.model_shape import download_of, read_known_facts
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Index
from stages.adapters.named_layers import missing_layers
from stages.core.errors import DataError, LayoutError, LifecycleError, RecipeError
from stages.data.any_rows import PromptReader
from stages.data.bad_rows import check_first_rows
from stages.data.config import DataConfig
from stages.data.files import find_files
from stages.data.templates import read_template
from stages.hubs.fetched import FetchedConfig
from stages.hubs.registry import HUBS
from stages.kinds.train.config import TrainConfig
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.model_folder import check_config, check_model_folder, check_unquantized, code_not_run
from stages.parallel.engines.registry import RULES


def check_models(recipe: Recipe, outside: Outside, index: Index) -> list[str]:
    """Return notes on what is unusual about the stages in `outside` and their models, a sentence each.

    Raises RecipeError that lists every model that cannot be trained, every layout that its model does not allow, and
    every bad chat template.
    """
    problems: list[str] = []
    notes: list[str] = []
    for name, config in recipe.stages.items():
        if name in outside and isinstance(config, TrainConfig):
            try:
                _ = config.data.chat_template and read_template(config.data.chat_template)
            except LifecycleError as error:
                problems.append(f"stages.{name}.data.chat_template: {error}")
            try:
                notes += [f"{name}: {note}" for note in _check(recipe, name, config, outside, index)]
            except LayoutError as error:
                problems.append(f"stages.{name}.layout: {error}")
            except LifecycleError as error:
                problems.append(f"stages.{name}.model: {error}")
    if problems:
        raise RecipeError("\n".join(problems))
    return notes


def _check(recipe: Recipe, name: str, config: TrainConfig, outside: Outside, index: Index) -> Iterator[str]:
    download = download_of(recipe, name)
    if download not in outside:
        return
    source = recipe.fetched[download]
    facts = _local_facts(source, outside[download], index)
    if facts is None:
        return
    check_config(facts, f"the config of {source.source}")
    check_unquantized(facts, str(source.source))
    if note := code_not_run(facts, trusted=config.trust_remote_code):
        yield note
    if HUBS[source.source.hub].is_local and source.request.patterns is None:
        yield from check_model_folder(ModelFacts(Path(source.source.name)))
    rules = RULES[config.engine]
    if rules.builds_from_shape:
        shape = rules.shape_of(facts)
        errors = [*rules.model_errors(config.layout, shape)]
        if sees_gpus(config):
            errors += rules.device_errors(GPU.torch_type, config.layout, config.precision, shape)
        if errors:
            raise LayoutError("; ".join(errors))
        yield from rules.layout_warnings(config.layout, config.constraints, shape)
    limit = facts.max_positions
    if limit is not None and config.data.sequence_length > limit:
        yield (
            f"data.sequence_length {config.data.sequence_length} is beyond the {limit} positions of {source.source}; "
            "documents of that length are refused or badly learned"
        )


def _local_facts(source: FetchedConfig, outside: dict[str, Any], index: Index) -> ModelFacts | None:
    """Return the facts of the model that a stage downloads, if its config is on this machine."""
    artifact = index.find(source.kind, version_of(identity_of(source, {}, outside)))
    if artifact and not artifact.damage and (artifact.folder / "model" / CONFIG_FILE).is_file():
        return ModelFacts(artifact.folder / "model")
    return read_known_facts(source, outside) if HUBS[source.source.hub].is_offline else None


def check_first_inputs(recipe: Recipe, will_run: Collection[str], outside: Outside, index: Index) -> None:
    """Raise RecipeError that lists what is wrong with rows and adapters of the trainings of these stages."""
    problems = [
        f"stages.{name}.{problem}"
        for name, config in recipe.stages.items()
        if name in will_run and isinstance(config, TrainConfig)
        for problem in [*_adapter(recipe, name, config, outside, index), *_rows(recipe, config, outside, index)]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _adapter(recipe: Recipe, name: str, config: TrainConfig, outside: Outside, index: Index) -> Iterator[str]:
    """Yield the layers that an adapter's config names and the model lacks."""
    folder = _folder(recipe, download_of(recipe, name), outside, index) if config.adapter else None
    try:
        if config.adapter and folder and (folder / CONFIG_FILE).is_file():
            yield from missing_layers(config.adapter, ModelFacts(folder))
    except (LifecycleError, SafetensorError, OSError):  # `check_models` reports it
        return


def _rows(recipe: Recipe, config: TrainConfig, outside: Outside, index: Index) -> Iterator[str]:
    """Yield problems that the first rows of each dataset show."""
    for place, part in config.data.parts.items():
        folder = _folder(recipe, part.dataset_stage, outside, index)
        for field, split in (("dataset", part.split), ("evaluation_split", part.evaluation_split)):
            if folder and split:
                try:
                    root, files = _files(folder, split)
                    check_first_rows(root, files, part, config.learning.rows, _reader(config, part))
                except DataError as error:
                    yield f"data.{place}{field}: {error}"
                except LifecycleError:  # the download reports it
                    return


def _reader(config: TrainConfig, part: DataConfig) -> Callable[[object], object] | None:
    """Return the reader of a sampling method's prompts, or None for rows that are learned from."""
    if not config.rollouts:
        return None
    return PromptReader(config.rollouts.reference, f"{config.method}.reference", part.columns).read


def _files(dataset: Path, split: str) -> tuple[Path, list[Path]]:
    """Return the folder and the files of a split. A single file is the training split; other splits it lacks."""
    if dataset.is_file():
        return dataset.parent, [dataset] if split == "train" else []
    return dataset, find_files(dataset, split)


def _folder(recipe: Recipe, name: str, outside: Outside, index: Index) -> Path | None:
    """Return the local folder of a download's files, in the store or at their source, or None.

    A dataset may be one file. A selection of a folder's files is left to the check of inputs.
    """
    config = recipe.fetched.get(name)
    if config is None or name not in outside or config.leaves_files:
        return None
    artifact = index.find(config.kind, version_of(identity_of(config, {}, outside[name])))
    if artifact and not artifact.damage:
        return artifact.folder / CONTENT_FOLDERS[config.product]
    # Headers are read even while files are being hashed; rows of such large files are left to the check of inputs.
    is_known = config.product == "model" or "revision" in outside[name]
    is_here = HUBS[config.source.hub].is_local and config.request.patterns is None and is_known
    return Path(config.source.name) if is_here else None
