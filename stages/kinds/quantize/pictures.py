"""Pictures of a quantization's rows, which a model that sees gets with their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.data.media.folder import MediaFolder
    from stages.data.media_reference import MediaReference
    from stages.models.processor import MediaProcessor


@dataclass(frozen=True)
class RowPictures:
    """Pictures of rows, decoded when a row is asked for. media: of each row that has pictures, by its number."""

    media: Mapping[int, Sequence[MediaReference]]
    folder: MediaFolder
    processor: MediaProcessor

    def inputs(self, number: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the model's arguments (tensors) for a row; raise DataError for a picture that has changed."""
        return self.processor.inputs(token_ids, [self.folder.load_image(one) for one in self.media[number]])
