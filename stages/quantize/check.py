"""What is wrong with the rows of a quantization, before the model is made."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError
from stages.quantize.config import QuantizeConfig
from stages.quantize.samples import read_samples


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Dotted field and error: splits, and that there are rows to calibrate and to judge with."""
    config = QuantizeConfig.model_validate(stage_input.config)
    data, model = (stage_input.inputs[name] for name in (config.calibration.dataset, config.model))
    try:
        read_samples(data / "data", model / "model", config.calibration, warn=lambda _: None)
    except LifecycleError as error:
        yield "calibration", error
