"""Many units at once, as arrays: what is stored of a part of a dataset, packed, and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.data.units import Unit


@dataclass(frozen=True)
class Units:
    """Units one after the other; `len` counts them."""

    tokens: NDArray[np.int32]
    """int32 [tokens] of all documents."""
    loss: NDArray[np.bool_]
    """bool [tokens]: whether the token is learned."""
    document_lengths: NDArray[np.int64]
    """int64 [documents]"""
    num_documents: NDArray[np.int64]
    """int64 [units]: of each."""
    labels: NDArray[np.bool_] | None = None
    """bool [units], of labelled answers."""
    margins: NDArray[np.float32] | None = None
    """float32 [units], of pairs that have them."""

    def __len__(self) -> int:
        return len(self.num_documents)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [units], in tokens."""
        ends = np.concatenate([[0], np.cumsum(self.document_lengths)])
        return np.diff(ends[np.concatenate([[0], np.cumsum(self.num_documents)])])

    def take(self, numbers: Sequence[int] | NDArray[np.int64]) -> Units:
        """Those of these numbers, in this order."""
        order = np.asarray(numbers, np.int64)
        documents = _ranges(self.num_documents, order)
        tokens = _ranges(self.lengths, order)
        return Units(
            self.tokens[tokens],
            self.loss[tokens],
            self.document_lengths[documents],
            self.num_documents[order],
            None if self.labels is None else self.labels[order],
            None if self.margins is None else self.margins[order],
        )

    @classmethod
    def of(cls, units: Sequence[Unit], *, is_labelled: bool = False, has_margins: bool = False) -> Units:
        """The same as arrays. is_labelled: each says whether it is a good answer. has_margins: each says how much
        better."""
        documents = [document for unit in units for document in unit.documents]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)]),
            np.concatenate([np.zeros(0, np.bool_), *(document.loss for document in documents)]),
            np.array([len(document) for document in documents], np.int64),
            np.array([len(unit.documents) for unit in units], np.int64),
            np.array([unit.is_good for unit in units], np.bool_) if is_labelled else None,
            np.array([unit.margin for unit in units], np.float32) if has_margins else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[Units]) -> Units:
        """One after the other; at least one. All have labels, or none; so for margins."""

        def whole(name: str) -> Any:
            return None if getattr(parts[0], name) is None else np.concatenate([getattr(one, name) for one in parts])

        return parts[0] if len(parts) == 1 else cls(**{name: whole(name) for name in cls.__dataclass_fields__})


def _ranges(lengths: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the elements of groups lie: `lengths` is of all groups, one after the other; those of `order` are asked."""
    starts = np.cumsum(lengths) - lengths
    wanted = lengths[order]
    moved = starts[order] - (np.cumsum(wanted) - wanted)
    return np.repeat(moved, wanted) + np.arange(int(wanted.sum()))
