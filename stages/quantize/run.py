"""The quantize stage: a model and calibration rows → a smaller model that can be served, and how much it lost.

Everything that can be wrong with the recipe or the model is found from file headers first; then the method's quantizer
works, and what it wrote is read back and judged by its KL divergence from the original.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.contract import StageContext, StageResult
from stages.core.errors import GateError, ModelError, RecipeError
from stages.models.model_folder import check_model_folder
from stages.models.projections import read_projections
from stages.quantize.config import QuantizeConfig
from stages.quantize.registry import quantizer_of
from stages.quantize.samples import read_samples
from stages.serving.registry import default_engine

if TYPE_CHECKING:
    from stages.quantize.divergence import Divergence

MIB = 2**20


def run(config: QuantizeConfig, context: StageContext) -> StageResult:
    """Check, quantize, reload, compare. Raises GateError when the KL exceeds `max_kl`; the metrics are logged first."""
    # Before tqdm is imported, which reads this once: bars would fill the log, and progress is reported by events.
    os.environ["TQDM_DISABLE"] = "1"
    source, target = context.inputs[config.model] / "model", context.work / "model"
    num_layers = _check(source, config)
    for caveat in default_engine().caveats(config.quantization):
        context.warn(caveat)
    samples = read_samples(context.inputs[config.calibration.dataset] / "data", source, config.calibration)
    context.milestone(
        f"quantizing {num_layers} layers with {config.method}, calibrated with "
        f"{sum(map(len, samples.calibration))} tokens of {len(samples.calibration)} rows"
    )
    quantizer_of(config.method)(
        source,
        target,
        config.quantization,
        samples.calibration,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        report=lambda done, total: context.progress(done, total, "layers", "calibrating"),
    )
    before, after = _mebibytes(source), _mebibytes(target)
    context.milestone(f"wrote the quantized model: {before:.1f} → {after:.1f} MiB")
    divergence = _compare(source, target, samples.evaluation, config, context)
    sizes = {"size_before_mib": before, "size_after_mib": after, "compression": before / after}
    metrics = {**divergence.metrics(), **sizes}
    context.log_metrics(0, metrics)
    _judge(metrics["kl_nats_per_token"], config.max_kl, divergence.worst_in_words(source))
    return StageResult(metrics=metrics, tags={"method": config.method, "group_size": str(config.group_size)})


def _check(source: Path, config: QuantizeConfig) -> int:
    """Number of layers to quantize. Raises ModelError or RecipeError for what cannot work, within milliseconds."""
    check_model_folder(source)
    model_config = json.loads((source / "config.json").read_text())
    if already := model_config.get("quantization_config"):
        raise ModelError(
            f"{source} is quantized already ({already.get('quant_method', 'unknown method')}); "
            "quantize the model that it was made from"
        )
    projections = read_projections(source)
    layers = config.quantization.layers(projections)
    if not layers:
        raise RecipeError(
            f"there is nothing to quantize: `ignore` matches all {len(projections)} linear layers of the model"
        )
    default_engine().check_loadable(model_config, projections, config.quantization)
    return len(layers)


def _compare(
    source: Path, target: Path, samples: list[list[int]], config: QuantizeConfig, context: StageContext
) -> Divergence:
    from stages.quantize.divergence import measure_divergence  # torch takes seconds to import: checks come first

    return measure_divergence(
        source,
        target,
        samples,
        trust_remote_code=config.trust_remote_code,
        report=lambda done, total: context.progress(done, total, "tokens", "comparing with the unquantized model"),
    )


def _mebibytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / MIB


def _judge(kl_nats: float, max_kl: float | None, worst: str) -> None:
    if not math.isfinite(kl_nats):
        raise ModelError("the quantized model predicts no finite probabilities; try another method or calibration rows")
    if max_kl is not None and kl_nats > max_kl:
        raise GateError(
            f"the quantized model is {kl_nats:.4f} nats per token from the unquantized one, and max_kl is {max_kl}; "
            f"it differs most before {worst}; a smaller group_size, more calibration rows like those it is used for, "
            "or method int8 or fp8 lose less"
        )
