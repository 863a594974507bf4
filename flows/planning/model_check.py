"""Chat templates and models that lie on this machine, against the train stages that use them: before any is copied.

What is on a hub only is checked right after its download, by the same functions. Reads JSON and headers, no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.planning.model_shape import download_of, read_known_config
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.record import Index
from stages.core.errors import LayoutError, LifecycleError, RecipeError
from stages.data.templates import read_template
from stages.engines.megatron.families import check_supported
from stages.kinds.download.config import DownloadConfig
from stages.kinds.train.config import TrainConfig
from stages.models.config_check import check_config, check_unquantized, code_not_run
from stages.models.model_config import CONFIG_FILE, max_positions, read_config
from stages.models.model_folder import check_model_folder
from stages.parallel.legality import layout_warnings, model_errors


def check_models(recipe: Recipe, outside: Outside, index: Index) -> list[str]:
    """What is unusual about the stages in `outside` and their models, a sentence each.

    Raises RecipeError that lists every model that cannot be trained, every layout that its model does not allow, and
    every chat template that is none.
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
    source = recipe.stages[download]
    assert isinstance(source, DownloadConfig)
    if download not in outside:
        return
    model_config = _local_config(source, outside[download], index)
    if model_config is None:
        return
    check_config(model_config, f"the config of {source.source}")
    check_unquantized(model_config, str(source.source))
    if note := code_not_run(model_config, trusted=config.trust_remote_code):
        yield note
    if source.source.hub == "file" and source.files is None:
        yield from check_model_folder(Path(source.source.name))
    if config.engine == "megatron":
        shape = check_supported(model_config)
        if errors := "; ".join(model_errors(config.engine, config.layout, shape)):
            raise LayoutError(errors)
        yield from layout_warnings(config.engine, config.layout, config.constraints, shape)
    limit = max_positions(model_config)
    if limit is not None and config.data.sequence_length > limit:
        yield (
            f"data.sequence_length {config.data.sequence_length} is beyond the {limit} positions of {source.source}; "
            "documents of that length are refused or badly learned"
        )


def _local_config(source: DownloadConfig, outside: dict[str, Any], index: Index) -> dict[str, Any] | None:
    """The `config.json` of what a stage downloads, if it is on this machine."""
    artifact = index.find(source.kind, version_of(identity_of(source, {}, outside)))
    if artifact and not artifact.damage and (artifact.folder / "model" / CONFIG_FILE).is_file():
        return read_config(artifact.folder / "model")
    return read_known_config(source, outside) if source.source.hub in ("file", "builtin") else None
