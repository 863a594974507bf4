"""How a model is to be quantized, as far as the engine that will serve it must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.models.projections import Projection, matches

GgufType = Literal["f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_0", "q4_k_m", "q4_k_s", "q4_0"]
K_BLOCK_SIZE = 256
"""Numbers in a block of a K-quant."""
WeightFormat = Literal["int4", "int8", "fp8"] | GgufType


def is_k_quant(weights: str) -> bool:
    """Whether blocks are K-quants, which llama.cpp's own library makes."""
    return "_k" in weights


@dataclass(frozen=True)
class Quantization:
    """method: as the recipe names it. group_size: input channels that share a scale (int4). ignore: names or patterns
    (`re:…`) of layers that are left alone.
    """

    method: str
    weights: WeightFormat
    group_size: int
    symmetric: bool
    ignore: tuple[str, ...]
    tensor_parallel_size: int

    def layers(self, projections: list[Projection]) -> list[Projection]:
        """Those of a model's layers that are quantized."""
        return [layer for layer in projections if not matches(layer.name, self.ignore)]
