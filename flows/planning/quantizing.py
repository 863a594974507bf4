"""Quantizations that a model's sizes do not allow, found as soon as its config can be read.

What only the headers of its files show is found right after its download.
"""

from __future__ import annotations

from collections.abc import Collection

from flows.planning.model_shape import ModelConfigs, download_of
from flows.recipe.recipe import Recipe
from stages.core.errors import LifecycleError, RecipeError
from stages.kinds.quantize.config import QuantizeConfig
from stages.models.model_config import shape_of_config
from stages.models.projections import projections_of


def check_quantizing(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs) -> None:
    """Raises `RecipeError` that lists the quantizations, of these stages, that could not be served.

    What a cluster does is left to it: its devices may take what those of this machine do not.
    """
    problems = []
    for name, config in recipe.stages.items():
        if name not in chosen or not isinstance(config, QuantizeConfig) or config.execution.launcher != "local":
            continue
        try:
            model_config = configs.of(download_of(recipe, name)) or {}
            layers = projections_of(shape_of_config(model_config))
        except LifecycleError:  # the download says so itself, or its headers will
            continue
        try:
            config.serving_engine.check_loadable(model_config, layers, config.quantization)
        except RecipeError as error:
            problems.append(f"stages.{name}.model: {error}")
    if problems:
        raise RecipeError("\n".join(problems))
