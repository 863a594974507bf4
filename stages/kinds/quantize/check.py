"""What is wrong with the model and the rows of a quantization, before the model is made."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError
from stages.kinds.quantize.check_model import check_headers, check_modules
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.samples import read_samples


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Dotted field and error: layers that cannot be quantized or served; splits, and rows to calibrate and judge with.

    The model may be that which training starts from: its layers are the same.
    """
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
