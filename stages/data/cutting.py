"""Texts → rows as pre-training has them: one after the other, cut wherever a row is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from stages.data.packing import PackedRows
from stages.data.unit_arrays import Units


def cut(texts: Iterable[Units], row_tokens: int) -> Iterator[PackedRows]:
    """Rows of one document of exactly `row_tokens` tokens, which all carry loss; what is left at the end is no row."""
    left = np.array([], np.int32)
    for batch in texts:
        tokens = np.concatenate([left, batch.tokens])
        num_rows = len(tokens) // row_tokens
        left = tokens[num_rows * row_tokens :]
        ones = np.ones(num_rows, np.int64)
        loss = np.tile(np.arange(row_tokens) > 0, num_rows)
        yield Units(tokens[: num_rows * row_tokens], loss, ones * row_tokens, ones), [1] * num_rows
