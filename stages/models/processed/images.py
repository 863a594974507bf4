"""Pictures as a model's processor takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from stages.models.processed.kind import Device, Noise, ProcessedKind


class Images(ProcessedKind[tuple[int, int]]):
    """Pictures: sizes are (width, height) in pixels, contents are pixels in RGB."""

    kind = "image"
    drawn_sizes = ((64, 40), (48, 90))
    smallest = (32, 32)
    tried_at_once = True
    has_samples = True  # Idefics 3
    known_by_ids = False

    def drawn(self, size: tuple[int, int], noise: Noise) -> Any:
        from PIL.Image import fromarray

        return fromarray(noise(size[1], size[0], 3))

    def content(self, medium: Any) -> Any:
        return medium

    def blank(self, size: tuple[int, int], device: Device) -> Any:
        if device == "meta":
            import torch

            return torch.zeros(3, size[1], size[0], dtype=torch.uint8, device=device)
        from PIL import Image

        return Image.new("RGB", size)

    def arguments(self, media: Sequence[tuple[tuple[int, int], Any]]) -> dict[str, Any]:
        return {"images": [[content for _, content in media]]}

    def follow(self, other: Self) -> None:
        if self.part and other.part and scales_to_pixels(self.part) and scales_to_pixels(other.part):
            self.part.size = other.part.size


def scales_to_pixels(image_processor: Any) -> bool:
    """Return whether an image processor of Transformers scales pictures to a number of pixels between two bounds."""
    known = {*getattr(image_processor.valid_kwargs, "__annotations__", {})}
    return {"min_pixels", "max_pixels"} <= known
