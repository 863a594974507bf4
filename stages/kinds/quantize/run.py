"""Quantize stage: makes a model smaller, and measures how much its predictions changed.

Problems of the recipe and the model are found without reading a weight; the result is read back and judged by its KL
divergence from the original. Training's record is compared with, too, and kept for stages that serve the model.
"""

from __future__ import annotations

import math
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.contract import StageContext, StageResult
from stages.core.errors import GateError, LifecycleError, ModelError
from stages.core.lines import counted
from stages.kinds.quantize.check import QuantizedLayers, check_headers, check_modules
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.registry import METHODS, QuantizationJob, quantizer_of
from stages.kinds.quantize.samples import Samples, read_samples
from stages.kinds.quantize.written import problems_beside_text, problems_of_carried
from stages.models.media import KINDS, NOUNS, in_words
from stages.models.model_folder import GGUF_FILE, files_with_weights
from stages.models.recorded import RECORD, read_record

if TYPE_CHECKING:
    from stages.kinds.quantize.divergence import Divergence

MIB = 2**20


def run(config: QuantizeConfig, context: StageContext) -> StageResult:
    """Quantize the model; fail if no server here could load it, it is damaged, or it differs by more than `max_kl`."""
    check_headers(context.inputs[config.model] / "model", config)
    for caveat in config.serving_engine.caveats(config.quantization):
        context.warn(caveat)
    return quantized(config, context)


def quantized(config: QuantizeConfig, context: StageContext) -> StageResult:
    """Quantize the model, whether or not the server on this machine has kernels for the result."""
    # Before tqdm is imported, which reads this once: bars would fill the log, and progress is reported by events.
    os.environ["TQDM_DISABLE"] = "1"
    source, target = context.inputs[config.model] / "model", context.work / "model"
    layers = check_modules(source, config)
    data = context.inputs[config.calibration.dataset] / "data"
    samples = read_samples(data, source, config.calibration, context.warn)
    rows = _rows_in_words(samples, sees=bool(layers.beside_text))
    context.milestone(
        f"quantizing {layers.num_layers} layers with {config.method}, {METHODS[config.method].use_of_rows} "
        f"{sum(map(len, samples.calibration))} tokens of {rows}; "
        f"they hold {layers.fraction_of_weights:.0%} of the weights"
    )
    with _library_errors_explained(f"quantizing {layers.model_class} with {config.method}"):
        job = QuantizationJob(
            source,
            target,
            config.quantization,
            samples.calibration,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            report=lambda done, total: context.progress(done, total, "layers", "calibrating"),
            pictures=samples.calibration_pictures,
        )
        problems = quantizer_of(config.method)(job)
    beside_text = {part: numbers.keys() for part, numbers in layers.beside_text.items()}
    kept = (*problems_of_carried(source, target, layers.carried), *problems_beside_text(source, target, beside_text))
    for problem in (*problems, *kept):
        context.refuse(problem)
    counts = _untouched(layers, samples, context) if layers.beside_text else {}
    before, after = _mebibytes(source), _mebibytes(target)
    context.milestone(f"wrote the quantized model: {before:.1f} → {after:.1f} MiB")
    types = _stored_types(target / GGUF_FILE, config, context) if (target / GGUF_FILE).is_file() else {}
    metrics = _judged(source, target, samples, config, context, layers.model_class)
    if (source.parent / RECORD).is_file():
        shutil.copyfile(source.parent / RECORD, context.work / RECORD)
    sizes = {"size_before_mib": before, "size_after_mib": after, "compression": before / after}
    metrics |= {**sizes, **types, **counts}
    context.log_metrics(0, metrics)
    groups = {"group_size": str(config.group_size)} if config.quantization.weights == "int4" else {}
    return StageResult(metrics=metrics, tags={"method": config.method, **groups})


def _rows_in_words(samples: Samples, *, sees: bool) -> str:
    """Return the number of calibration rows in words, and of a model that sees or hears, which media they have."""
    rows = counted(len(samples.calibration), "row")
    if not sees:
        return rows
    if not samples.calibration_pictures:
        return f"{rows} of text alone, as none has media"
    left_out = f" ({samples.num_left_out} with other media, or none, are left out)" if samples.num_left_out else ""
    return f"{rows} with {in_words(samples.calibration_pictures.kinds)}{left_out}"


def _untouched(layers: QuantizedLayers, samples: Samples, context: StageContext) -> dict[str, float]:
    """Return the numbers of tensors and parameters that stayed as they were, by part of a model that sees."""
    metrics: dict[str, float] = {}
    beside_text = {part: numbers for part, numbers in layers.beside_text.items() if numbers}
    for part, numbers in beside_text.items():
        metrics |= {
            f"{part}_tensors_kept": float(len(numbers)),
            f"{part}_parameters_kept": float(sum(numbers.values())),
        }
    of_rows = samples.calibration_pictures
    found = Counter(medium.kind for media in (of_rows.media.values() if of_rows else ()) for medium in media)
    metrics |= {f"calibration_{NOUNS[kind]}s": float(found[kind]) for kind in KINDS if found[kind]}
    context.milestone(
        "as they were: "
        + ", ".join(
            f"{counted(len(numbers), 'weight')} of the {part.replace('_', ' ')} ({sum(numbers.values()):,} parameters)"
            for part, numbers in beside_text.items()
        )
    )
    return metrics


def _stored_types(file: Path, config: QuantizeConfig, context: StageContext) -> dict[str, float]:
    """Log the types of a GGUF file's matrices, some not the recipe's, and return their counts as metrics."""
    from stages.kinds.quantize.gguf_file import stored_types

    found = stored_types(file, config.quantization.weights)
    context.milestone(found.in_words())
    for caveat in found.caveats():
        context.warn(caveat)
    return found.metrics()


@contextmanager
def _library_errors_explained(doing: str) -> Iterator[None]:
    """Turn errors of llm-compressor and Transformers about an unsupported model into a ModelError."""
    try:
        yield
    except (LifecycleError, OSError, MemoryError):
        raise
    except Exception as error:
        if "out of memory" in str(error).lower() or _is_own_assertion(error):
            raise
        raise ModelError(
            f"{doing} failed: {type(error).__name__}: {error}; choose another method, or leave the layers that it "
            "fails at out with `ignore`"
        ) from error


def _is_own_assertion(error: Exception) -> bool:
    """Return whether an assertion of this project failed, not one of a library about a model that it does not know."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return isinstance(error, AssertionError) and frames[-1][0].f_globals["__name__"].startswith("stages.")


def _compare(source: Path, target: Path, samples: Samples, config: QuantizeConfig, context: StageContext) -> Divergence:
    from stages.kinds.quantize.divergence import measure_divergence  # torch takes seconds to import

    return measure_divergence(
        source,
        target,
        samples.evaluation,
        samples.evaluated,
        pictures=samples.evaluation_pictures,
        recorded=read_record(source.parent) if (source.parent / RECORD).is_file() else (),
        trust_remote_code=config.trust_remote_code,
        report=lambda done, total: context.progress(done, total, "tokens", "comparing with the unquantized model"),
    )


def _mebibytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in files_with_weights(folder)) / MIB


def _judged(
    source: Path, target: Path, samples: Samples, config: QuantizeConfig, context: StageContext, model_class: str
) -> dict[str, float]:
    """Return differences from the original's predictions as metrics; fail if too large or not computable."""
    try:
        with _library_errors_explained(f"reading the quantized {model_class} back with Transformers"):
            divergence = _compare(source, target, samples, config, context)
    except ModelError as error:
        context.refuse(error)
        return {}
    metrics = divergence.metrics()
    kl_nats = metrics["kl_nats_per_token"]
    if not math.isfinite(kl_nats):
        context.refuse(
            ModelError("the quantized model predicts no finite probabilities; try another method or calibration rows")
        )
    elif config.max_kl is not None and kl_nats > config.max_kl:
        context.refuse(
            GateError(
                f"the quantized model is {kl_nats:.4f} nats per token from the unquantized one, and max_kl is "
                f"{config.max_kl}; it differs most before {divergence.worst_in_words(source)}; a smaller group_size, "
                "more calibration rows like those it is used for, or method int8 or fp8 lose less"
            )
        )
    return {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no others
