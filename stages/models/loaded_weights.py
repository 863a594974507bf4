"""Whether loaded weights can be trained at all: damage that no header shows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from stages.core.errors import ModelError

NUM_NAMED = 3


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError, naming them, when weights that were read from `folder` hold NaN or infinity."""
    bad = sorted(name for name, weight in weights if not torch.isfinite(weight).all())
    if bad:
        raise ModelError(
            f"loading {folder}: {len(bad)} weights hold NaN or infinity ({', '.join(bad[:NUM_NAMED])}); whatever made "
            "this model diverged, or overflowed its dtype: take an earlier one, or fetch it again"
        )
