"""Registry of the quantization methods, and the protocol of a quantizer; a new method is a line here."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.core.errors import ModelError
from stages.kinds.quantize.pictures import RowPictures
from stages.serving.engine import Quantization, WeightFormat


@dataclass(frozen=True)
class QuantizationJob:
    """Job for a quantizer: the model folder `source`, the new folder `target`, and how to quantize.

    samples: token ids, a list a row. pictures: of all these rows; None for rows of text. report: called as
    report(done, total), with layers that were calibrated.
    """

    source: Path
    target: Path
    quantization: Quantization
    samples: list[list[int]]
    seed: int
    trust_remote_code: bool
    report: Callable[[int, int], None]
    pictures: RowPictures | None = None


class Quantizer(Protocol):
    """Protocol of a quantizer: the function `quantize` of a method's module."""

    def __call__(self, job: QuantizationJob) -> Sequence[ModelError]:
        """Quantize `job.source` into `job.target`, copy all other files, and return the problems of what was written.

        Bit-identical for the same folder, samples, seed and machine. Raises ModelError for what cannot be written.
        """


@dataclass(frozen=True)
class MethodEntry:
    """Quantization method: its weight format, the module that implements it, and the engine that serves the result.

    weights: None where the recipe names the format. module: has the function `quantize`; imported when used.
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
    """Return the function that implements a quantization method."""
    quantizer: Quantizer = importlib.import_module(METHODS[method].module).quantize
    return quantizer
