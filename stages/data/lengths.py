"""How long the documents of prepared datasets are: counts in bins of one width, a file of a training's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stages.core.strict import StrictModel

LENGTHS_FILE = "lengths.json"
NUM_BINS = 40
"""At most."""


class Lengths(StrictModel):
    """Content of `lengths.json`. counts: dataset (of a mixture by name, else without one) → documents in each bin; bin
    k holds those of more than `k × bin_tokens` and at most `(k + 1) × bin_tokens` tokens.
    """

    bin_tokens: int
    counts: dict[str, tuple[int, ...]]


def count_lengths(lengths: Mapping[str, NDArray[np.int64]]) -> Lengths:
    """lengths: dataset → int64 [documents], tokens of each."""
    longest = max((int(one.max()) for one in lengths.values() if len(one)), default=1)
    bin_tokens = max(1, math.ceil(longest / NUM_BINS))
    num_bins = max(1, math.ceil(longest / bin_tokens))
    counts = {
        name: tuple(np.bincount(np.maximum(one - 1, 0) // bin_tokens, minlength=num_bins).tolist())
        for name, one in lengths.items()
    }
    return Lengths(bin_tokens=bin_tokens, counts=counts)
