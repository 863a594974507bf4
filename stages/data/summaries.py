"""Summaries of prepared data for later stages, reports and people: lengths, a look at rows, a prompt with tools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.core.strict import StrictModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LENGTHS_FILE = "lengths.json"
NUM_BINS = 40
"""At most."""


class Piece(StrictModel):
    """Neighbouring tokens as text, all learned or all not; all special tokens or none."""

    text: str
    learned: bool = False
    special: bool = False


class ShownDocument(StrictModel):
    """A text that attends to itself alone. name: what it is of its row, such as `chosen`.

    num_hidden_tokens: of its end, which is left out here for its length.
    """

    name: str
    num_tokens: int
    num_target_tokens: int
    pieces: tuple[Piece, ...]
    num_hidden_tokens: int = 0


class ShownRow(StrictModel):
    """Documents that share a row. name: its number, or where it stands. num_padding_tokens: None without packing."""

    name: str
    documents: tuple[ShownDocument, ...]
    num_padding_tokens: int | None = None


class Bar(StrictModel):
    """Of a histogram: how many documents have from `first` to `last` tokens."""

    first: int
    last: int
    count: int


class Dropped(StrictModel):
    """Rows that were left out for one reason. example: where the first of them stands."""

    reason: str
    count: int
    example: str


class ShownPortion(StrictModel):
    """All rows of a portion, or the first, until there was no time for more: `unread_after` says after which.

    share: of a dataset in a mixture, how much of all that the training learns from is of it. epochs: its passes through
    these rows. None where the rows of the mixture were not all read.
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
    dropped: tuple[Dropped, ...]
    lengths: tuple[Bar, ...]
    warnings: tuple[str, ...] = ()
    unread_after: str | None = None
    share: float | None = None
    epochs: float | None = None

    @property
    def target_fraction(self) -> float:
        """Share of the tokens that are learned."""
        return self.num_target_tokens / max(1, self.num_tokens)


class DataLook(StrictModel):
    """rows: those that the first step learns from, or the first prompts."""

    what: str
    portions: tuple[ShownPortion, ...]
    rows: tuple[ShownRow, ...]
    warnings: tuple[str, ...] = ()


class Lengths(StrictModel):
    """Content of `lengths.json`. counts: dataset (of a mixture by name, else without one) → documents in each bin; bin
    k holds those of more than `k × bin_tokens` and at most `(k + 1) × bin_tokens` tokens.
    """

    bin_tokens: int
    counts: dict[str, tuple[int, ...]]


def count_lengths(lengths: Mapping[str, NDArray[np.int64]]) -> Lengths:
    """lengths: dataset → int64 [documents], tokens of each."""
    import numpy as np  # flows read these summaries, and need no arrays

    longest = max((int(one.max()) for one in lengths.values() if len(one)), default=1)
    bin_tokens = max(1, math.ceil(longest / NUM_BINS))
    num_bins = max(1, math.ceil(longest / bin_tokens))
    counts = {
        name: tuple(np.bincount(np.maximum(one - 1, 0) // bin_tokens, minlength=num_bins).tolist())
        for name, one in lengths.items()
    }
    return Lengths(bin_tokens=bin_tokens, counts=counts)


class ToolPrompt(StrictModel):
    """Messages that end with a question or a tool's answer, and the tokens that training made of them.

    tools: as the template got them. variables: of the chat template. token_ids: of the messages, and of the beginning
    of the answer after them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    token_ids: list[int]
