"""Videos as a model's processor takes them: some of their frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from stages.core.errors import ModelError
from stages.models.media import MediaError, Video, VideoSize
from stages.models.processed.kind import KEPT_SIZES, Device, Noise, ProcessedKind

SAMPLING = ("fps", "num_frames", "max_frames", "cap_pixels_per_frame")
"""Fields of a processor of videos that say which frames a model takes, and of what size."""
GRID = "video_grid_thw"
"""Name of the feature that holds a video's frames, of which Qwen and GLM join two, and their height and width."""


class Videos(ProcessedKind[VideoSize]):
    """Videos, by the rate of frames in the processor's files. Too short ones raise MediaError, no rate ModelError."""

    kind = "video"
    drawn_sizes = (VideoSize(64, 40, 9, 3.0), VideoSize(48, 90, 12, 2.0))
    smallest = VideoSize(32, 32, 4, 2.0)
    usual_bounds: ClassVar = {"fps": 2, "max_frames": 32}

    def __init__(self, folder: Path, processor: Any) -> None:
        super().__init__(folder, processor)
        self._frames = lru_cache(KEPT_SIZES)(self._sampled)

    @property
    def lacks_rate(self) -> bool:
        return self.part.fps is None and self.part.num_frames is None

    def taken(self, size: VideoSize) -> Sequence[int]:
        """Return the numbers of the frames that the model takes."""
        return self._frames(size)

    def _sampled(self, size: VideoSize) -> tuple[int, ...]:
        if self.lacks_rate:
            raise ModelError(
                f"the processor in {self.folder} does not say how many frames of a video its model takes; set, for "
                "example, `media: {fps: 2, max_frames: 32}` in the training stage"
            )
        from transformers.video_utils import VideoMetadata

        options = {name: getattr(self.part, name, None) for name in self.part.valid_kwargs.__annotations__}
        try:
            found = self.part.sample_frames(metadata=VideoMetadata(**size.metadata), **options)
        except (ValueError, ZeroDivisionError) as error:
            raise MediaError(f"has too few frames ({size.num_frames}) for the model's processor: {error}") from error
        numbers = tuple(int(number) for number in found)
        if not numbers:
            raise MediaError(f"has too few frames ({size.num_frames}) for the model's processor, which takes none")
        return numbers

    def drawn(self, size: VideoSize, noise: Noise) -> Video:
        numbers = self.taken(size)
        return Video(size, noise(len(numbers), size.height, size.width, 3), numbers, b"")

    def content(self, medium: Video) -> Any:
        return medium.frames

    def blank(self, size: VideoSize, device: Device) -> Any:
        import torch

        return torch.zeros(len(self.taken(size)), 3, size.height, size.width, dtype=torch.uint8, device=device)

    def arguments(self, media: Sequence[tuple[VideoSize, Any]]) -> dict[str, Any]:
        metadata = [size.metadata | {"frames_indices": [*self.taken(size)]} for size, _ in media]
        return {"videos": [content for _, content in media], "do_sample_frames": False, "video_metadata": metadata}

    def patches(self, size: VideoSize, outputs: Mapping[str, Any], config: Any) -> tuple[int, ...]:
        """Return those of each frame as the tower takes them: patches of two frames do not attend to each other."""
        (number,) = super().patches(size, outputs, config)
        frames = int(outputs[GRID][0, 0]) if GRID in outputs else len(self.taken(size))
        return (number // frames,) * frames

    def follow(self, other: Self) -> None:
        for name in SAMPLING:
            setattr(self.part, name, getattr(other.part, name, None))
