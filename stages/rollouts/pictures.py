"""Pictures of a prompt as a serving engine takes them, and as training does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.data.media.folder import MediaFolder
from stages.data.media_reference import MediaReference
from stages.serving.engine import SeenDocument

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PromptPictures:
    """Pictures of a prompt in a dataset's folder. token_ids: of the prompt, with one placeholder for each picture."""

    token_ids: list[int]
    media: tuple[MediaReference, ...]
    folder: MediaFolder

    def seen(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> SeenDocument:
        """Return what an engine is asked about, with the pictures' bytes. Raises DataError if a picture has changed.

        prompt: the tokens of training, in which each picture has as many as the processor writes for it.
        """
        return SeenDocument(
            [*prompt, *answer], [*self.token_ids, *answer], list(map(self.folder.data_address, self.media))
        )

    def images(self) -> list[Image]:
        """Return the decoded pictures, in order. Raises DataError if one has changed."""
        return list(map(self.folder.load_image, self.media))
