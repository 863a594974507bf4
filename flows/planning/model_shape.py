"""The shape of the model that a train stage of a recipe starts from, whether or not it has been downloaded yet.

Training and quantization leave a model's shape as it is, so it is that of the download that the stage stands on: read
from the store when it is there, else from the source itself, or a table of published models while that does not answer.
"""

from __future__ import annotations

from typing import Any

from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.record import Index
from stages.core.contract import base_of
from stages.core.errors import RecipeError, TransientError
from stages.download.config import DownloadConfig
from stages.hubs.registry import read_model_config
from stages.models.known_models import known_model
from stages.models.model_config import read_config, shape_of_config
from stages.models.shape import ModelShape


def download_of(recipe: Recipe, stage: str) -> str:
    """The download that the field `model` of a stage leads to; of adapters, that of their base."""
    name = base_of(stage, recipe.stages)
    while recipe.stages[name].kind != "download":
        upstream = recipe.stages[name].references().get("model")
        if upstream is None:
            raise RecipeError(f"looking for the model of {stage}: {name} refers to none")
        name = base_of(upstream, recipe.stages)
    return name


def shape_of_download(recipe: Recipe, name: str, outside: Outside, index: Index) -> ModelShape:
    """Shape of the model that a stage downloads.

    outside: of the stages that the train stage stands on, from `resolve_outside`.
    Raises DownloadError or ModelError when it cannot be read, or is of a kind that the planner does not know.
    """
    found = config_of_download(recipe, name, outside, index)
    if found is not None:
        return shape_of_config(found)
    source = str(_download(recipe, name).model)
    known = known_model(source)
    if known is None:
        raise TransientError(f"reading the sizes of {source}: its hub does not answer, and no table has it")
    return known


def config_of_download(recipe: Recipe, name: str, outside: Outside, index: Index) -> dict[str, Any] | None:
    """The `config.json` of the model that a stage downloads; None when its hub has not answered.

    Raises DownloadError or ModelError when it cannot be read.
    """
    config = _download(recipe, name)
    artifact = index.find(config.kind, version_of(identity_of(config, {}, outside[name])))
    if artifact and not artifact.damage:
        return read_config(artifact.folder / "model")
    if "revision" in outside[name]:
        return read_model_config(config.source, str(outside[name]["revision"]))
    return None


def _download(recipe: Recipe, name: str) -> DownloadConfig:
    config = recipe.stages[name]
    assert isinstance(config, DownloadConfig)
    return config
