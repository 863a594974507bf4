"""Pixels that stay bytes until the model's forward pass normalises them, which makes them four times as large.

Processors of Qwen's and GLM's models normalise pixels last, and arrange them in rows of patches. For which processors
that holds, drawn media tell: what is normalised afterwards must equal the processor's own features to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stages.models.media import MediaKind

if TYPE_CHECKING:
    from torch import Tensor

PIXELS: dict[MediaKind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Name of the feature that holds a kind's pixels."""
AS_BYTES = {f"{kind}s_kwargs": {"do_rescale": False, "do_normalize": False} for kind in PIXELS}
"""Options of a processor that leave pixels bytes."""


def normalized(pixels: Tensor, statistics: Tensor) -> Tensor:
    """Return the features that pixels stand for, float32. statistics: as `statistics_of` returns them."""
    mean, deviation = statistics
    return (pixels - mean).div_(deviation)  # in two steps, as torchvision: the same fp32 numbers


def statistics_of(name: str, raw: Mapping[str, Tensor], features: Mapping[str, Tensor], part: Any) -> Tensor | None:
    """Return mean and deviation of each value of a patch, float32 [2, values]; None if the processor does otherwise.

    name: of the feature that holds pixels. raw, features: of the same media, with pixels as bytes, and as the processor
    makes them. part: of Transformers' processor, which takes these media.
    """
    pixels = raw[name]
    if pixels.is_floating_point() or pixels.ndim != 2:  # others may be padded after they are normalised
        return None
    # [2, channels] -> [2, values]: a patch holds one channel after the other
    in_channels = features[name].new_tensor([part.image_mean, part.image_std]) * (1.0 / part.rescale_factor)
    statistics = in_channels.repeat_interleave(pixels.shape[1] // in_channels.shape[1], dim=1)
    made = {**raw, name: normalized(pixels, statistics)}
    is_equal = made.keys() == features.keys() and all(made[one].equal(value) for one, value in features.items())
    return statistics if is_equal else None
