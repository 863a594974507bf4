"""Mixture of several datasets as one `MixedDataset`, and the order in which training visits its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stages.core.cache import content_key
from stages.data.dataset import Description, PackedDataset, Row, row_order
from stages.data.media.folder import MediaFolder
from stages.data.media_reference import MediaReference
from stages.models.recorded import ToolPrompt

if TYPE_CHECKING:
    from stages.models.media import MediaKind, Medium, Sampling

WHEEL = 1 << 64
STRIDE = 0x9E3779B97F4A7C15
"""Factor that turns a number in a mixture's order into a place, 2**64 divided by the golden ratio.

The places spread each dataset's rows evenly (Knuth 1998, The Art of Computer Programming, vol. 3, section 6.4, theorem
S)."""


class MixedDataset(PackedDataset):
    """Mixture of several packed datasets as one dataset; rows and documents are numbered across all of them."""

    def __init__(self, members: Mapping[str, PackedDataset]) -> None:
        self.members = dict(members)
        self._list = list(members.values())
        self.about = _joined([one.about for one in self._list])
        self._first_rows = [0, *accumulate(map(len, self._list))]
        self._first_documents = [0, *accumulate(one.num_documents for one in self._list)]
        self._see = self._processor = None

    @property
    def key(self) -> str:
        return content_key({"mixture": [one.key for one in self._list]})

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([one.document_lengths for one in self._list])

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([one.row_lengths for one in self._list])

    @property
    def longest_document(self) -> int:
        return max(one.longest_document for one in self._list)

    @property
    def member_rows(self) -> dict[str, range]:
        starts = self._first_rows
        return {name: range(starts[number], starts[number + 1]) for number, name in enumerate(self.members)}

    def row_documents(self, row_indices: Sequence[int]) -> NDArray[np.int64]:
        found = [np.arange(0)]
        for row in row_indices:
            number, own = self._place(row)
            found.append(self._list[number].row_documents([own]) + self._first_documents[number])
        return np.concatenate(found)

    def labels(self, row: int) -> list[bool]:
        number, own = self._place(row)
        return self._list[number].labels(own)

    def margins(self, row: int) -> list[float]:
        number, own = self._place(row)
        return self._list[number].margins(own)

    @property
    def distinct_media(self) -> frozenset[MediaReference]:
        return frozenset(
            replace(medium, path=f"{name}/{medium.path}")
            for name, dataset in self.members.items()
            for medium in dataset.distinct_media
        )

    def media(self, row: int) -> list[tuple[MediaReference, ...]]:
        number, own = self._place(row)
        return self._list[number].media(own)

    def media_folder(self, row: int) -> MediaFolder | None:
        return self._list[self._place(row)[0]].media_folder(row)

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        return frozenset().union(*(one.media_kinds for one in self._list))

    def pictures(self, row: int, sampling: Sampling | None = None) -> list[list[Medium]]:
        number, own = self._place(row)
        return self._list[number].pictures(own, sampling or self._processor)

    def _row(self, row: int) -> Row:
        number, own = self._place(row)
        return self._list[number]._row(own)

    @property
    def prompts(self) -> tuple[ToolPrompt, ...]:
        return tuple(prompt for one in self._list for prompt in one.prompts)

    def _place(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return number, row - self._first_rows[number]


def joined(members: Mapping[str, PackedDataset]) -> PackedDataset:
    """Return several packed datasets as one mixture; a single dataset is returned unchanged."""
    return MixedDataset(members) if len(members) > 1 else next(iter(members.values()))


def _joined(abouts: Sequence[Description]) -> Description:
    """Return the description of a mixture of packed datasets, whose counts are sums."""
    counts = [name for name in Description.model_fields if name.startswith("num_") and name != "num_good"]
    num_good = [one.num_good for one in abouts if one.num_good is not None]
    num_bytes = [one.bytes_per_token * one.num_tokens for one in abouts if one.bytes_per_token is not None]
    num_tokens = sum(one.num_tokens for one in abouts)
    return abouts[0].model_copy(
        update={
            **{name: sum(getattr(one, name) for one in abouts) for name in counts},
            "num_good": sum(num_good) if num_good else None,
            "most_patches": max(one.most_patches for one in abouts),
            "most_sound_frames": max(one.most_sound_frames for one in abouts),
            "has_margins": any(one.has_margins for one in abouts),
            "conversations": any(one.conversations for one in abouts),
            "bytes_per_token": sum(num_bytes) / num_tokens if len(num_bytes) == len(abouts) else None,
            "warnings": tuple(warning for one in abouts for warning in one.warnings),
            "tool_prompts": tuple(prompt for one in abouts for prompt in one.tool_prompts),
        }
    )


@dataclass(frozen=True)
class MixtureOrder:
    """Order in which a training visits the rows of a mixture; any stretch is computed from the seed and its position.

    In any stretch of slots each dataset has its share, within a few rows, and takes its rows in its own order, epoch
    after epoch. sizes: rows of each dataset. shares: of the slots; they add up to 1.
    """

    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    seed: int

    def rows(self, first: int, count: int) -> list[int]:
        """Return the numbers of `count` rows in the mixture's order, from position `first` (counted from 0) on."""
        slots = np.arange(first, first + count, dtype=np.uint64)
        places = slots * np.uint64(STRIDE) + np.uint64(self._begin)  # modulo WHEEL
        # [count]: the dataset in whose share a place lies; a place on a border is of the next one.
        numbers = np.searchsorted(np.array(self._borders[:-1], np.uint64), places, side="right")
        taken, first_rows = self.taken(first), [0, *accumulate(self.sizes)]
        rows = []
        for number in numbers.tolist():
            epoch, index = divmod(taken[number], self.sizes[number])
            rows.append(first_rows[number] + int(_row_order(self.sizes[number], self.seed, epoch, number)[index]))
            taken[number] += 1
        return rows

    def taken(self, num_slots: int) -> list[int]:
        """Return how many rows of each dataset are among the first `num_slots` rows of the mixture's order."""
        # [datasets + 1]: how many of the slots lie below each border
        below = [0, *(_num_below(border, num_slots, self._begin) for border in self._borders[:-1]), num_slots]
        return [end - start for start, end in pairwise(below)]

    def times(self, num_slots: int) -> NDArray[np.int64]:
        """Return how often each row occurs among the first `num_slots` rows of the mixture's order, int64 [rows]."""
        counts = []
        for number, (size, taken) in enumerate(zip(self.sizes, self.taken(num_slots), strict=True)):
            epochs, rest = divmod(taken, size)
            times = np.full(size, epochs, np.int64)
            times[_row_order(size, self.seed, epochs, number)[:rest]] += 1
            counts.append(times)
        return np.concatenate(counts)

    @property
    def _begin(self) -> int:
        return int(np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0])

    @property
    def _borders(self) -> list[int]:
        """Cumulative shares of the mixture's datasets, scaled from [0, 1] to integers below 2**64."""
        # 2**64 itself does not fit into uint64.
        return [min(WHEEL - 1, round(end * WHEEL)) for end in accumulate(self.shares)]


def _num_below(border: int, num_slots: int, begin: int) -> int:
    """Count the mixture's first rows of the leading datasets, whose shares add up to `border`.

    Each row at place x counts ⌊x⌋ - ⌊x - border⌋: 1 if x lies below the border, else 0.
    """
    # A whole wheel more keeps the offset positive; it adds 1 to each slot's term, which is subtracted again.
    shifted = _floor_sum(num_slots, STRIDE, begin - border + WHEEL) - num_slots
    return _floor_sum(num_slots, STRIDE, begin) - shifted


def _floor_sum(count: int, factor: int, offset: int, modulus: int = WHEEL) -> int:
    """Return Σ ⌊(factor · t + offset) / modulus⌋ over 0 ≤ t < count, in as many steps as Euclid's algorithm.

    Graham, Knuth, Patashnik 1994, Concrete Mathematics, section 3.5.
    """
    total = 0
    while True:
        # Whole multiples of the modulus are summed at once; factor and offset are below it then.
        total += count * (count - 1) // 2 * (factor // modulus) + count * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        end = factor * count + offset
        if end < modulus:
            return total
        count, offset, factor, modulus = end // modulus, end % modulus, modulus, factor


# `rows` needs the order of a whole dataset for each of its rows.
_row_order = lru_cache(maxsize=16)(row_order)
