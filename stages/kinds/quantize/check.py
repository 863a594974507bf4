"""Early check of quantize stages: the model's config, file headers and layers, and the calibration rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, RecipeError
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.registry import METHODS
from stages.kinds.quantize.samples import read_samples
from stages.models.carried_weights import mtp_names
from stages.models.facts import ModelFacts
from stages.models.linear_layers import BESIDE_TEXT, read_projections
from stages.models.model_folder import check_model_folder, check_unquantized


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Yield a quantize stage's errors by config field, from its model or the one that training starts from."""
    config = QuantizeConfig.model_validate(stage_input.config)
    data, model = (stage_input.inputs[name] for name in (config.calibration.dataset, config.model))
    try:
        check_headers(model / "model", config)
        check_modules(model / "model", config)
    except LifecycleError as error:
        yield "model", error
    try:
        read_samples(data / "data", model / "model", config.calibration, warn=lambda _: None)
    except LifecycleError as error:
        yield "calibration", error


@dataclass(frozen=True)
class QuantizedLayers:
    """Summary of the layers that will be quantized: number, and share of the model's weights.

    carried: names of weights that are copied as they are, since Transformers does not load them. beside_text: number of
    parameters by name in files, by part of a model that sees, of the weights that are not of its language part.
    """

    model_class: str
    num_layers: int
    fraction_of_weights: float
    carried: frozenset[str]
    beside_text: dict[str, dict[str, int]]


def check_headers(source: Path, config: QuantizeConfig) -> None:
    """Raise ModelError or RecipeError if config and file headers show that a model cannot be quantized or served."""
    facts = ModelFacts(source)
    check_model_folder(facts)
    check_unquantized(facts, str(source))
    if problem := config.problem_of_tower(facts):
        raise RecipeError(problem)
    projections = read_projections(source)
    if not config.quantization.layers(projections):
        raise RecipeError(
            f"there is nothing to quantize: `ignore` matches all {len(projections)} linear layers of the model"
        )
    mtp = mtp_names(f"{layer.name}.weight" for layer in projections)  # stay as they are, as do towers for images
    of_text = [layer for layer in projections if not BESIDE_TEXT.search(layer.name)]
    quantizable = [layer for layer in of_text if f"{layer.name}.weight" not in mtp]
    config.serving_engine.check_loadable(facts, quantizable, config.quantization)
    METHODS[config.method].check(source)


def check_modules(source: Path, config: QuantizeConfig) -> QuantizedLayers:
    """Return a summary of the quantized layers, from a model built without weights, within seconds.

    Raises ModelError or RecipeError for what the model's modules do not allow.
    """
    import torch  # takes seconds, so the checks of file headers come first

    from stages.models.start_up import hide_unused_packages

    hide_unused_packages()
    from stages.kinds.quantize.layers import (
        beside_text,
        build_without_weights,
        carried_by,
        check_nothing_lost,
        check_quantizable,
        quantized_layers,
    )

    model = build_without_weights(source, trust_remote_code=config.trust_remote_code)
    check_quantizable(model, config.quantization, config.ignore)
    check_nothing_lost(model, source)
    quantized = quantized_layers(model, config.quantization)
    num_weights = sum(layer.output_size * layer.input_size for layer in quantized.values())
    num_all = sum(map(torch.numel, model.parameters()))
    carried = frozenset(carried_by(model, source))
    untouched = {
        part: {name: math.prod(shape) for name, shape in shapes.items()}
        for part, shapes in beside_text(model, source).items()
    }
    return QuantizedLayers(type(model).__name__, len(quantized), num_weights / num_all, carried, untouched)
