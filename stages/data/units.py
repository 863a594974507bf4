"""Tokenized rows → units that fit a packed row: a document, or a preference pair, which must not be torn apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stages.core.errors import DataError
from stages.data.files import Place
from stages.data.messages import RowError
from stages.data.tokenizer import Tokens

NUM_NAMED = 10


@dataclass(frozen=True)
class Unit:
    """What is learned from one row of the dataset: a document, or chosen and rejected. `len` counts tokens."""

    documents: tuple[Tokens, ...]
    is_good: bool | None = None
    """Of a labelled answer."""
    margin: float | None = None
    """Of a pair, by how much its chosen answer is better."""

    def __len__(self) -> int:
        return sum(map(len, self.documents))


@dataclass
class OverLong:
    """Applies `over_long` to units of more than `sequence_length` tokens, and remembers what it did."""

    policy: Literal["truncate", "drop", "fail"]
    sequence_length: int
    num_over_long: int = 0
    longest_tokens: int = 0
    named: list[tuple[Place, int]] = field(default_factory=list)
    """The first ones, and their tokens."""
    num_kept: int = 0
    _last_place: Place | None = None

    def fit(self, unit: Unit, place: Place) -> Unit | None:
        """The unit, or its beginning, or None when it is left out."""
        if len(unit) <= self.sequence_length:
            self.num_kept += 1
            return unit
        self.longest_tokens = max(self.longest_tokens, len(unit))
        if place != self._last_place:  # a row of several units counts once
            self._last_place = place
            self.num_over_long += 1
            if len(self.named) < NUM_NAMED:
                self.named.append((place, len(unit)))
        return self._truncated(unit) if self.policy == "truncate" else None

    def add(self, other: OverLong) -> None:
        """Count what was found in rows after these."""
        self.num_over_long += other.num_over_long
        self.longest_tokens = max(self.longest_tokens, other.longest_tokens)
        self.named = [*self.named, *other.named][:NUM_NAMED]
        self.num_kept += other.num_kept

    def check(self, num_rows: int) -> str | None:
        """What to warn of, once all rows were seen. Raises DataError when `policy` does not allow what was found."""
        if not self.num_over_long:
            return None
        found = (
            f"{self.num_over_long} of {num_rows} rows have more than sequence_length {self.sequence_length} tokens, "
            f"up to {self.longest_tokens}"
        )
        if self.policy == "fail":
            raise DataError(
                f"{found}: {', '.join(f'{place} ({tokens} tokens)' for place, tokens in self.named)}"
                f"{', …' if self.num_over_long > len(self.named) else ''}. Raise "
                "`sequence_length`, or say `over_long: truncate` or `over_long: drop`."
            )
        if self.policy == "drop" and self.num_over_long == num_rows and not self.num_kept:
            raise DataError(f"{found}, and `over_long: drop` leaves nothing to learn from. Raise `sequence_length`.")
        return f"{found}: {'their ends were cut off' if self.policy == 'truncate' else 'they were left out'}"

    def _truncated(self, unit: Unit) -> Unit:
        """Cut at the end. Of a pair the longer one is, then both, so that each keeps at least half of the row."""
        lengths = [len(document) for document in unit.documents]
        share = self.sequence_length // len(lengths)
        spare = sum(max(0, share - length) for length in lengths)
        return replace(unit, documents=tuple(document.cut(share + spare) for document in unit.documents))


def check_learnable(unit: Unit, was_truncated: bool) -> None:
    """Raises RowError for a unit that teaches nothing."""
    where = "in the part that sequence_length leaves" if was_truncated else "once it is rendered and tokenized"
    if not all(document.loss.any() for document in unit.documents):
        raise RowError(f"has nothing to learn from {where}: no token of an answer; expected at least one")
    if len(unit.documents) > 1 and np.array_equal(unit.documents[0].ids, unit.documents[1].ids):
        raise RowError(f"has the same `chosen` and `rejected` {where}; expected two different answers")
