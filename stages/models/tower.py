"""Costs of pictures in a model that sees, by patch, as a walk measures them (`tower_walk`); needs no torch.

A patch is what the tower makes one vector of; how many a picture has follows from the shape of its pixel values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from stages.models.flops import PictureFlops

ModelPart = Literal["vision_tower", "projector", "language_model", "audio_tower"]
"""Part of a model that sees or hears; the merger of towers like Qwen's and GLM's is the projector."""
CHANNELS = 3
USUAL_SIDE = 14
USUAL_SIZE = (640, 480)
"""Size of a picture, (width, height) in pixels, that is planned for where none is known: most photos of COCO."""


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
    """Vision tower and projector of a model: what a picture costs in them, by the number of its patches."""

    num_layers: int
    layer_parameters: int
    """Number of parameters of all layers of the tower."""
    tower_parameters: int
    """Number of parameters of the tower, those of its layers included."""
    projector_parameters: int
    other_parameters: int
    """Number of parameters outside the layers of text, embedding and head, in the model that sees."""
    products: float
    """Number of the tower's weights that a patch is multiplied by."""
    projector_products: float
    pair_products: float
    """Number of multiplications for each pair of patches of a picture; 0 where a picture is cut into tiles."""
    patch_values: float
    """Number of pixel values of a patch."""
    picture_patches: float
    """Number of patches of a picture of `USUAL_SIZE`."""
    kept_bf16: TowerBytes
    kept_fp32: TowerBytes

    def kept(self, bytes_per_value: int) -> TowerBytes:
        return self.kept_fp32 if bytes_per_value == 4 else self.kept_bf16

    def flops(self, *, tower_learns: bool = True, projector_learns: bool = True) -> PictureFlops:
        """Return the sizes that decide the FLOPs of pictures."""
        products = (self.products, self.projector_products, self.pair_products)
        return PictureFlops(*products, tower_learns, projector_learns)


def num_patches(shape: Sequence[int], side: int) -> int:
    """Return the number of patches of pixel values. shape: […, patches, values], or […, channels, height, width]."""
    if len(shape) <= CHANNELS:
        return prod(shape[:-1])
    return prod(shape) // (CHANNELS * side**2)


def sub_configs(config: Any) -> list[Any]:
    """Return Transformers' config of a model, and those of its parts, such as the vision tower."""
    return [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]


def patch_side(config: Any) -> int:
    """Return the side of a patch in pixels. config: Transformers' config of a model that sees."""
    found = next((one.patch_size for one in sub_configs(config) if getattr(one, "patch_size", None)), USUAL_SIDE)
    return int(found if isinstance(found, int) else found[-1])
