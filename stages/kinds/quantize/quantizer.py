"""What a quantizer does: a model folder and calibration samples → a smaller model folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from stages.core.errors import ModelError
from stages.serving.engine import Quantization


class Quantizer(Protocol):
    """A module's function `quantize`; `registry.py` says which methods it knows."""

    def __call__(
        self,
        source: Path,
        target: Path,
        quantization: Quantization,
        samples: list[list[int]],
        *,
        seed: int,
        trust_remote_code: bool,
        report: Callable[[int, int], None],
    ) -> Sequence[ModelError]:
        """Write the quantized model of folder `source` to `target`, with everything else that `source` holds.

        Returns what is wrong with what was written; raises ModelError for what cannot be written.
        samples: token ids, a list a row. `report(done, total)` counts the layers that were calibrated. The same folder,
        samples and seed give the same weights, bit for bit, on the same machine.
        """
