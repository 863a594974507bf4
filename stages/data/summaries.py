"""Summaries of prepared data for reports and `lifecycle data`: counts, length histograms and sample rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.core.fields import StrictModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LENGTHS_FILE = "lengths.json"
NUM_BINS = 40
"""Largest number of bins in a histogram of document lengths."""


class TokenSpan(StrictModel):
    """Run of consecutive tokens as text for the data preview, with flags for loss and for special tokens."""

    text: str
    learned: bool = False
    special: bool = False


class ShownPicture(StrictModel):
    """Medium of a document as the data preview shows it.

    width, height: in pixels; 0 for a sound. seconds: of a sound or video, of which the model takes `num_frames`.
    thumbnail: a small copy, of a video's first frame, as a `data:` address.
    """

    path: str
    width: int
    height: int
    num_tokens: int
    thumbnail: str | None = None
    seconds: float | None = None
    num_frames: int | None = None


class ShownDocument(StrictModel):
    """Document as the data preview shows it. name: its part in the row (`chosen`). num_hidden_tokens: at its end."""

    name: str
    num_tokens: int
    num_target_tokens: int
    pieces: tuple[TokenSpan, ...]
    num_hidden_tokens: int = 0
    pictures: tuple[ShownPicture, ...] = ()


class ShownRow(StrictModel):
    """Packed row as the data preview shows it. name: its number or place. num_padding_tokens: None without packing."""

    name: str
    documents: tuple[ShownDocument, ...]
    num_padding_tokens: int | None = None


class Bar(StrictModel):
    """Bar of a length histogram: the number of documents that have `first` to `last` tokens."""

    first: int
    last: int
    count: int


class DroppedRows(StrictModel):
    """Reason why rows were dropped, with their number. `example` is the place of the first one."""

    reason: str
    count: int
    example: str


class ShownPortion(StrictModel):
    """Counts of the training rows or of the held-out rows of a dataset, shown in the data preview.

    unread_after: place of the last row read in the time. share: in all that the training learns from. epochs: passes of
    the training through these rows. Both are None where not all rows of the mixture were read.
    """

    name: str
    num_source_rows: int
    num_rows: int
    num_documents: int
    num_tokens: int
    num_target_tokens: int
    sequence_length: int | None
    padding_fraction: float | None
    over_long: str
    num_over_long: int
    num_bad_rows: int
    dropped: tuple[DroppedRows, ...]
    lengths: tuple[Bar, ...]
    warnings: tuple[str, ...] = ()
    unread_after: str | None = None
    share: float | None = None
    epochs: float | None = None

    @property
    def target_fraction(self) -> float:
        return self.num_target_tokens / max(1, self.num_tokens)


class DataLook(StrictModel):
    """Preview of a stage's training data (`lifecycle data`): counts, and rows of the first step or prompts."""

    what: str
    portions: tuple[ShownPortion, ...]
    rows: tuple[ShownRow, ...]
    warnings: tuple[str, ...] = ()


class Lengths(StrictModel):
    """Histogram of document lengths for each dataset of a training, stored in `lengths.json`.

    bin_tokens: bin k holds lengths from `k × bin_tokens` (exclusive) to `(k + 1) × bin_tokens`. counts: by dataset (one
    alone: an empty name), number of documents in each bin.
    """

    bin_tokens: int
    counts: dict[str, tuple[int, ...]]


def count_lengths(lengths: Mapping[str, NDArray[np.int64]]) -> Lengths:
    """Return a histogram for each dataset's document lengths, int64 [documents], in tokens."""
    import numpy as np  # flows read these summaries, and need no arrays

    longest = max((int(one.max()) for one in lengths.values() if len(one)), default=1)
    bin_tokens = max(1, math.ceil(longest / NUM_BINS))
    num_bins = max(1, math.ceil(longest / bin_tokens))
    counts = {
        # bin_tokens 10: lengths 1 to 10 -> bin 0, 11 to 20 -> bin 1
        name: tuple(np.bincount(np.maximum(one - 1, 0) // bin_tokens, minlength=num_bins).tolist())
        for name, one in lengths.items()
    }
    return Lengths(bin_tokens=bin_tokens, counts=counts)
