"""Costs of media in the towers of a model, by patch, as a walk measures them (`tower_walk`); needs no torch.

A patch of a picture is what the tower makes one vector of: how many it has follows from the shape of its pixel values.
A patch of a sound is a frame of its spectrogram, those of padding included, which towers compute as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from stages.models.flops import TowerFlops
from stages.models.media import ModelPart

SPECTROGRAM = "input_features"
"""Name of the feature that holds the spectrograms of sounds."""
CHANNELS = 3
USUAL_SIDE = 14
USUAL_SIZE = (640, 480)
"""Size of a picture, (width, height) in pixels, that is planned for where none is known: most photos of COCO."""
USUAL_SECONDS = 10
"""Length of a sound that is planned for where none is known."""


@dataclass(frozen=True)
class TowerBytes:
    """Bytes of activations per patch that are kept for the backward pass."""

    layers: float
    """Bytes that all layers of a tower keep that learns."""
    inputs: float
    """Bytes of the inputs of these layers, which are all that recomputed ones keep."""
    results: float
    """Bytes of the results of products in these layers, which selective recomputation keeps, too."""
    outside: float
    """Bytes that the rest of the tower, and the projector, keep where both learn."""
    projector: float
    """Bytes that the projector keeps behind a frozen tower."""


@dataclass(frozen=True)
class Tower:
    """Tower and projector of a model: what a picture, or a sound, costs in them, by the number of its patches."""

    part: ModelPart
    num_layers: int
    layer_parameters: int
    """Number of parameters of all layers of the tower."""
    tower_parameters: int
    """Number of parameters of the tower, those of its layers included."""
    projector_parameters: int
    other_parameters: int
    """Number of parameters outside the layers of text, embedding and head, in the model that reads media."""
    products: float
    """Number of the tower's weights that a patch is multiplied by."""
    projector_products: float
    pair_products: float
    """Number of multiplications for each pair of patches of a medium; 0 where a picture is cut into tiles."""
    patch_values: float
    """Number of pixel values, or of values of a spectrogram, of a patch."""
    usual_patches: float
    """Number of patches of a picture of `USUAL_SIZE`, or of a sound of `USUAL_SECONDS`."""
    kept_bf16: TowerBytes
    kept_fp32: TowerBytes

    def kept(self, bytes_per_value: int) -> TowerBytes:
        return self.kept_fp32 if bytes_per_value == 4 else self.kept_bf16

    def flops(self, *, tower_learns: bool = True, projector_learns: bool = True) -> TowerFlops:
        """Return the sizes that decide the FLOPs of media."""
        products = (self.products, self.projector_products, self.pair_products)
        return TowerFlops(self.part, *products, tower_learns, projector_learns)


def num_patches(shape: Sequence[int], side: int) -> int:
    """Return the number of patches of pixel values. shape: […, patches, values], or […, channels, height, width]."""
    if len(shape) <= CHANNELS:
        return prod(shape[:-1])
    return prod(shape) // (CHANNELS * side**2)


def num_frames(shape: Sequence[int], num_bins: int) -> int:
    """Return the number of frames of spectrograms. shape: [sounds, frames, bins], or [sounds, bins, frames]."""
    return prod(shape) // num_bins


def sub_configs(config: Any) -> list[Any]:
    """Return Transformers' config of a model, and those of its parts, such as the vision tower."""
    return [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]


def patch_side(config: Any) -> int:
    """Return the side of a patch in pixels. config: Transformers' config of a model that sees."""
    found = next((one.patch_size for one in sub_configs(config) if getattr(one, "patch_size", None)), USUAL_SIDE)
    return int(found if isinstance(found, int) else found[-1])
