"""What the headers of a model tell of its layout, before anything slow starts."""

from __future__ import annotations

import json
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import LayoutError
from stages.engines.megatron.families import check_supported
from stages.models.shape import ModelShape
from stages.parallel.legality import layout_problems
from stages.train.config import TrainConfig


def check_layout(config: TrainConfig, context: StageContext, model_folder: Path) -> None:
    """Raise LayoutError for a layout that the model does not allow, ModelError for a model that the engine does not.

    What is only unwise becomes a warning. FSDP2 takes every model and layout that a recipe can name.
    """
    shape = _shape(model_folder) if config.engine == "megatron" else None
    problems = layout_problems(config.engine, config.layout, config.setting, shape)
    errors = [problem.message for problem in problems if problem.severity == "error"]
    if errors:
        raise LayoutError("; ".join(errors))
    for problem in problems:
        context.warn(problem.message)


def _shape(model_folder: Path) -> ModelShape:
    model_config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    check_supported(model_config)
    return ModelShape.from_config(model_config)
