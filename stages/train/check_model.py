"""Whether engine and layout suit the model, by its `config.json` alone, before anything slow starts.

What is wrong with a layout for any model was found when the config was read.
"""

from __future__ import annotations

from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import LayoutError, ModelError
from stages.engines.megatron.families import check_supported
from stages.models.model_config import read_config, shape_of_config
from stages.models.shape import ModelShape
from stages.parallel.legality import layout_warnings, model_errors
from stages.train.config import TrainConfig


def check_model(config: TrainConfig, context: StageContext, model_folder: Path) -> ModelShape | None:
    """The model's shape; None for a model whose sizes are not known, which FSDP2 trains all the same.

    Raises LayoutError for a layout that the model does not allow, ModelError for a model that the engine does not.
    What is only unwise becomes a warning.
    """
    model_config = read_config(model_folder)
    if config.engine == "megatron":
        shape = check_supported(model_config)
        if errors := "; ".join(model_errors(config.engine, config.layout, shape)):
            raise LayoutError(errors)
        for warning in layout_warnings(config.engine, config.layout, config.constraints, shape):
            context.warn(warning)
        return shape
    try:
        return shape_of_config(model_config)
    except ModelError as error:
        context.warn(f"memory and step time of this model are not predicted: {error}")
        return None
