"""The methods of quantization there are. A new one is a line here, and a module when its quantizer is new."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from stages.kinds.quantize.quantizer import Quantizer
from stages.serving.engine import WeightFormat


@dataclass(frozen=True)
class MethodEntry:
    """What a method makes of weights (None: the recipe says), the module whose `quantize` does it, imported when it is
    asked to, and the engine that serves what comes out.
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
    """The function that quantizes by a method."""
    quantizer: Quantizer = importlib.import_module(METHODS[method].module).quantize
    return quantizer
