"""Bound of the media of a packed row (`max_patches`), by the patches that towers make of them.

Tokens do not bound a tower's memory: families that see make 4 to 16 patches of what becomes one token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.media_reference import MediaReference, of_records
from stages.data.units import NUM_NAMED, Units
from stages.models.media import MediaSize

PatchesOf = Callable[[MediaSize], Sequence[int]]
"""Function that returns the number of patches of a picture, or of each of a video's frames, by its size."""


@dataclass
class PatchBound:
    """Bound of a row's patches, with counts of the documents and pairs that alone exceed it."""

    config: DataConfig
    patches_of: PatchesOf
    num_beyond: int = 0
    largest: int = 0
    num_units: int = 0
    named: list[str] = field(default_factory=list)
    """First documents beyond the bound, by their pictures, for messages."""

    def within(self, units: Units) -> Units:
        """Return the training units without those that alone exceed the bound, which are counted."""
        most = self.config.max_patches
        if most is None or units.media is None:
            return units
        patches = self._of_units(units)
        beyond = np.flatnonzero(patches > most)
        self.num_units += len(units)
        self.num_beyond += len(beyond)
        self.largest = max(self.largest, int(patches.max(initial=0)))
        for number in beyond[: NUM_NAMED - len(self.named)].tolist():
            self.named.append(_named(_media(units.take([number])), int(patches[number])))
        return units.take(np.flatnonzero(patches <= most)) if len(beyond) else units

    def sizes(self, units: Units) -> NDArray[np.int64]:
        """Return what units take of a row of `sequence_length`: their share of its tokens or patches, the larger."""
        most = self.config.max_patches
        if most is None or units.media is None:
            return units.lengths
        shares = -(-self._of_units(units) * self.config.sequence_length // most)  # rounded up
        return np.maximum(units.lengths, shares)

    def check(self) -> str | None:
        """Return a warning about documents beyond the bound; raise DataError if `over_long` is `fail`."""
        if not self.num_beyond:
            return None
        problem = (
            f"{self.num_beyond} of {self.num_units} documents or pairs have media of more than max_patches "
            f"{self.config.max_patches}, up to {self.largest} patches: {', '.join(self.named)}"
            f"{', …' if self.num_beyond > len(self.named) else ''}"
        )
        if self.config.over_long == "fail":
            raise DataError(
                f"{problem}. Raise `max_patches`, scale pictures down (`media: {{max_pixels: …}}`), or say "
                "`over_long: drop`."
            )
        return f"{problem}: they were left out, as media are never cut"

    def _of_units(self, units: Units) -> NDArray[np.int64]:
        """Return the number of patches of each training unit, int64 [units]."""
        assert units.media is not None and units.media_lengths is not None
        documents = np.zeros(len(units.document_lengths), np.int64)
        ends = np.cumsum(units.media_lengths)
        for number in np.flatnonzero(units.media_lengths).tolist():
            records = units.media[ends[number] - units.media_lengths[number] : ends[number]]
            documents[number] = sum(sum(self.patches_of(one.size)) for one in of_records(records.tobytes()))
        before = np.concatenate([[0], np.cumsum(documents)])
        return np.diff(before[np.concatenate([[0], np.cumsum(units.num_documents)])])


def _media(units: Units) -> tuple[MediaReference, ...]:
    assert units.media is not None
    return of_records(units.media.tobytes())


def _named(media: tuple[MediaReference, ...], patches: int) -> str:
    others = f" and {len(media) - 1} more" if len(media) > 1 else ""
    return f"the one with {media[0].path}{others} ({patches} patches)"
