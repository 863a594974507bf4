"""Whether engine and layout suit the model, by its `config.json` alone, before anything slow starts.

What is wrong with a layout for any model was found when the config was read.
"""

from __future__ import annotations

from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import LayoutError, ModelError
from stages.engines.megatron.families import check_supported
from stages.kinds.train.blocks import MoeConfig
from stages.kinds.train.config import TrainConfig
from stages.models.config_check import check_unquantized, code_not_run
from stages.models.model_config import LEARNED_POSITIONS, max_positions, read_config, shape_of_config
from stages.models.model_folder import check_unquantized, code_not_run
from stages.models.shape import ModelShape
from stages.parallel.legality import layout_warnings, model_errors


def check_lengths(longest: int, context: StageContext, model_folder: Path) -> None:
    """Compare the longest document (tokens) with the positions that the model has.

    Raises ModelError when they are a table that is too short; what was only never trained becomes a warning.
    """
    model_config = read_config(model_folder)
    limit = max_positions(model_config)
    if limit is None or longest <= limit:
        return
    found = f"the longest document has {longest} tokens, and the model's config says {limit} positions"
    if model_config.get("model_type") in LEARNED_POSITIONS:
        raise ModelError(
            f"{found}, which are a table; lower data.sequence_length, with `over_long: truncate` or `drop`"
        )
    context.warn(f"{found}: it was not trained on longer texts")


def check_model(config: TrainConfig, context: StageContext, model_folder: Path) -> ModelShape | None:
    """The model's shape; None for a model whose sizes are not known, which FSDP2 trains all the same.

    Raises LayoutError for a layout that the model does not allow, ModelError for a model that the engine does not.
    What is only unwise becomes a warning.
    """
    model_config = read_config(model_folder)
    check_unquantized(model_config, str(model_folder))
    if note := code_not_run(model_config, trusted=config.trust_remote_code):
        context.warn(note)
    if config.engine == "megatron":
        shape = check_supported(model_config)
        if config.moe != MoeConfig() and not shape.num_experts:
            raise ModelError(f"`moe` is for mixtures of experts, and {shape.family} has none; remove it")
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
