"""Media of one kind as a model's processor takes them: base class of a module for each, which `registry` lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from stages.models.media import MediaKind, MediaSize, Medium
from stages.models.pixels import PIXELS
from stages.models.processor_files import PARTS
from stages.models.tower import num_patches, patch_side

if TYPE_CHECKING:
    from torch import Tensor

Size = TypeVar("Size", bound=MediaSize)
Device = Literal["cpu", "meta"]
Noise: TypeAlias = Callable[..., Any]
"""Function that returns random bytes of a shape, NumPy's uint8."""
KEPT_SIZES = 4096
"""Number of combinations of sizes of which answers are remembered."""


class AskedProcessor(Protocol):
    """Processor of all kinds of media, as one kind asks it; implemented by `MediaProcessor`."""

    def written(self, sizes: tuple[MediaSize, ...]) -> tuple[str, ...]:
        """Return what the processor puts in place of each placeholder."""

    def drawn(self, size: MediaSize) -> Medium:
        """Return a medium of this size that holds noise."""

    def features(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        """Return the model's inputs of one document's media."""


class ProcessedKind(ABC, Generic[Size]):
    """Media of one kind, as the processor of a model folder takes them.

    drawn_sizes: of the drawn media with which a processor is tried. smallest: of a medium that a tower is given for
    nothing. usual_bounds: fields of `PictureBounds` for processors without a rate. tried_at_once: before one is met.
    has_samples: whether some processors give their features a dimension of samples. known_by_ids: whether it is checked
    that their tokens are known by their ids. sizes_suffice: whether processors may count them without contents.
    """

    kind: ClassVar[MediaKind]
    drawn_sizes: ClassVar[tuple[Any, Any]]
    smallest: ClassVar[Any]
    usual_bounds: ClassVar[Mapping[str, float]] = {}
    tried_at_once: ClassVar[bool] = False
    has_samples: ClassVar[bool] = False
    known_by_ids: ClassVar[bool] = True
    sizes_suffice: ClassVar[bool] = True

    def __init__(self, folder: Path, processor: Any) -> None:
        """Note the part of Transformers' processor that takes this kind; None if none does."""
        self.folder = folder
        self.part: Any = getattr(processor, PARTS[self.kind], None)

    def taken(self, _size: Size) -> Any:
        """Return what a decoder has to know of what the model takes: nothing, numbers of frames, or a rate."""
        return None

    @property
    def lacks_rate(self) -> bool:
        """Return whether the processor's files do not say which part of such a medium the model takes."""
        return False

    @abstractmethod
    def drawn(self, size: Size, noise: Noise) -> Medium:
        """Return a medium of this size that holds noise."""

    @abstractmethod
    def content(self, medium: Any) -> Any:
        """Return what Transformers' processor takes of a medium: pixels or samples."""

    @abstractmethod
    def blank(self, size: Size, device: Device) -> Any:
        """Return a blank content of this size, on a device of torch: `meta` where the size suffices."""

    @abstractmethod
    def arguments(self, media: Sequence[tuple[Size, Any]]) -> dict[str, Any]:
        """Return the processor's arguments for media, of each its size and content."""

    def check_whole(self, size: Size, processor: AskedProcessor) -> None:
        """Raise MediaError for a medium of which the processor would leave out the end."""

    def patches(self, _size: Size, outputs: Mapping[str, Any], config: Any) -> tuple[int, ...]:
        """Return the number of patches of a medium in each part that a tower takes by itself.

        outputs: of the processor for it. config: Transformers' config of the model.
        """
        return (num_patches(outputs[PIXELS[self.kind]].shape, patch_side(config)),)

    def counted(self, _features: Sequence[Mapping[str, Tensor]]) -> list[int]:
        """Return the number of patches of each medium from the features of all; empty if sizes say it."""
        return []

    def follow(self, other: Self) -> None:
        """Take the settings of another model's processor that decide sizes and frames."""
