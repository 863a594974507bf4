"""Check of loaded weights for NaN and infinity, which no header shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stages.core.errors import ModelError

NUM_NAMED = 3


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError with their names if weights read from `folder` hold NaN or infinity."""
    check_all_finite(folder, sorted(name for name, weight in weights if not torch.isfinite(weight).all()))


def check_all_finite(folder: Path, not_finite: Sequence[str]) -> None:
    """Raise ModelError with the names of weights that are not finite, if there are any."""
    if not_finite:
        raise ModelError(
            f"loading {folder}: {len(not_finite)} weights hold NaN or infinity ({', '.join(not_finite[:NUM_NAMED])}); "
            "whatever made this model diverged, or overflowed its dtype: take an earlier one, or fetch it again"
        )
