"""Memory of the tower of a model that sees, by the patches of its rows' pictures (`stages.models.tower`).

Engines run it before the layers of text: what it keeps for its backward pass is there until theirs is over.
"""

from dataclasses import dataclass

from stages.models.shape import ModelShape
from stages.models.tower import Tower, TowerBytes
from stages.parallel.layout import Layout
from stages.planner.workload import Workload

PIXEL_BYTES = 4
"""Bytes of a pixel value as a batch brings it."""


@dataclass(frozen=True)
class PictureBytes:
    """Bytes of a micro-batch's pictures: kept until the tower's backward pass is over, and while a layer computes."""

    kept: float = 0.0
    workspace: float = 0.0


def picture_bytes(shape: ModelShape, layout: Layout, workload: Workload, *, learns: bool = True) -> PictureBytes:
    """Return the bytes of a micro-batch's pictures on one process rank. learns: whether the model does."""
    tower, pictures = shape.tower, workload.pictures
    if tower is None or pictures is None:
        return PictureBytes()
    patches = pictures.most_patches * layout.micro_batch_size
    kept = tower.kept(workload.compute_bytes)
    layer = kept.layers / tower.num_layers
    by_patch = PIXEL_BYTES * tower.patch_values
    if learns and workload.learns("vision_tower"):
        by_patch += kept.outside + _kept_in_layers(tower, layout, kept)
    elif learns and workload.learns("projector"):
        by_patch += kept.projector
    return PictureBytes(patches * by_patch, patches * layer)


def _kept_in_layers(tower: Tower, layout: Layout, kept: TowerBytes) -> float:
    """Return the bytes per patch that a tower's layers keep on the device, under the layout's recomputation."""
    if layout.recompute == "full":
        return kept.inputs
    if layout.recompute == "selective":
        return min(kept.layers, kept.inputs + kept.results)
    if layout.recompute == "offload":
        return min(1.0, 2 / tower.num_layers) * kept.layers
    return kept.layers


def layers_of_tower(shape: ModelShape) -> float:
    """Return the number of parameters in a tower's layers, which are groups of their own, where the model has them."""
    return float(shape.tower.layer_parameters) if shape.tower and _has_tower(shape, shape.tower) else 0.0


@dataclass(frozen=True)
class Frozen:
    """Number of parameters that do not learn, by where they are."""

    tower_layers: float = 0.0
    others: float = 0.0
    """Number of parameters of the projector, and of the tower outside its layers."""
    text: float = 0.0

    @property
    def total(self) -> float:
        return self.tower_layers + self.others + self.text


def frozen_parts(shape: ModelShape, workload: Workload) -> Frozen:
    """Return the parameters of the parts of a model that sees which are frozen, without an adapter."""
    tower = shape.tower
    if tower is None or workload.adapter:
        return Frozen()
    of_tower = of_projector = in_layers = 0
    if _has_tower(shape, tower):
        of_tower = 0 if workload.learns("vision_tower") else tower.tower_parameters
        in_layers = 0 if workload.learns("vision_tower") else tower.layer_parameters
        of_projector = 0 if workload.learns("projector") else tower.projector_parameters
    text = 0 if workload.learns("language_model") else shape.num_parameters - shape.other_parameters
    return Frozen(in_layers, of_tower - in_layers + of_projector, text)


def _has_tower(shape: ModelShape, tower: Tower) -> bool:
    """Return whether the model's parameters are those of the class that sees, and not of one for text alone."""
    return shape.other_parameters >= tower.tower_parameters + tower.projector_parameters
