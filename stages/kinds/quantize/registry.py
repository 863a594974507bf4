"""Methods of quantization, and the protocol of a quantizer with its job.

A new method is a line here, and a module if its quantizer is new.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.core.errors import ModelError
from stages.serving.engine import Quantization, WeightFormat


@dataclass(frozen=True)
class QuantizationJob:
    """A model to quantize. source, target: folders of the model and of the quantized one, which does not exist yet.

    samples: token ids, a list a row.
    report: called as report(done, total), with layers that were calibrated.
    """

    source: Path
    target: Path
    quantization: Quantization
    samples: list[list[int]]
    seed: int
    trust_remote_code: bool
    report: Callable[[int, int], None]


class Quantizer(Protocol):
    """Protocol of a module's function `quantize`."""

    def __call__(self, job: QuantizationJob) -> Sequence[ModelError]:
        """Write the quantized model of `source` to `target`, with everything else that `source` holds.

        The same folder, samples and seed give the same weights, bit for bit, on the same machine.

        Returns the problems of what was written. Raises ModelError for what cannot be written.
        """


@dataclass(frozen=True)
class MethodEntry:
    """A method of quantization.

    weights: format of the weights; None: the recipe names it.
    module: has the function `quantize`; imported when it is used.
    engine: serves the quantized model.
    """

    weights: WeightFormat | None
    module: str
    engine: str = "vllm"


METHODS: dict[str, MethodEntry] = {
    "awq": MethodEntry("int4", "stages.kinds.quantize.llm_compressor"),
    "gptq": MethodEntry("int4", "stages.kinds.quantize.llm_compressor"),
    "int8": MethodEntry("int8", "stages.kinds.quantize.llm_compressor"),
    "fp8": MethodEntry("fp8", "stages.kinds.quantize.llm_compressor"),
    "gguf": MethodEntry(None, "stages.kinds.quantize.gguf_file", "llama_cpp"),
}


def quantizer_of(method: str) -> Quantizer:
    """Return the function that quantizes by a method."""
    quantizer: Quantizer = importlib.import_module(METHODS[method].module).quantize
    return quantizer
