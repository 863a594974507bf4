"""Memory of the towers of a model, by the patches of its rows' pictures and sounds (`stages.models.tower`).

Engines run them before the layers of text: what they keep for their backward pass is there until theirs is over.
"""

from dataclasses import dataclass

from stages.models.shape import ModelShape
from stages.models.tower import Tower, TowerBytes
from stages.parallel.layout import Layout
from stages.planner.workload import Workload

PIXEL_BYTES = 4
"""Bytes of a pixel, or of a spectrogram's value, as towers take it; the byte that some are made of is not counted."""


@dataclass(frozen=True)
class MediaBytes:
    """Bytes of a micro-batch's media: kept until the tower's backward pass is over, and while a layer computes."""

    kept: float = 0.0
    workspace: float = 0.0


def media_bytes(shape: ModelShape, layout: Layout, workload: Workload, *, learns: bool = True) -> MediaBytes:
    """Return the bytes of a micro-batch's media on one process rank. learns: whether the model does."""
    kept_bytes = workspace = 0.0
    for tower, media in workload.media_by_tower(shape):
        patches = media.most_patches * layout.micro_batch_size
        kept = tower.kept(workload.compute_bytes)
        by_patch = PIXEL_BYTES * tower.patch_values
        if learns and workload.learns(tower.part):
            by_patch += kept.outside + _kept_in_layers(tower, layout, kept)
        elif learns and workload.learns("projector"):
            by_patch += kept.projector
        kept_bytes += patches * by_patch
        workspace = max(workspace, patches * kept.layers / tower.num_layers)  # one tower runs after the other
    return MediaBytes(kept_bytes, workspace)


def _kept_in_layers(tower: Tower, layout: Layout, kept: TowerBytes) -> float:
    """Return the bytes per patch that a tower's layers keep on the device, under the layout's recomputation."""
    if layout.recompute == "full":
        return kept.inputs
    if layout.recompute == "selective":
        return min(kept.layers, kept.inputs + kept.results)
    if layout.recompute == "offload":
        return min(1.0, 2 / tower.num_layers) * kept.layers
    return kept.layers


def layers_of_towers(shape: ModelShape) -> float:
    """Return the number of parameters in the towers' layers, which are groups of their own, if the model has them."""
    return float(sum(one.layer_parameters for one in _towers(shape)))


@dataclass(frozen=True)
class Frozen:
    """Number of parameters that do not learn, by where they are."""

    tower_layers: float = 0.0
    others: float = 0.0
    """Number of parameters of the projector, and of the towers outside their layers."""
    text: float = 0.0

    @property
    def total(self) -> float:
        return self.tower_layers + self.others + self.text


def frozen_parts(shape: ModelShape, workload: Workload) -> Frozen:
    """Return the parameters of the parts of a model that reads media which are frozen, without an adapter."""
    if not shape.towers or workload.adapter:
        return Frozen()
    towers = _towers(shape)
    frozen = [one for one in towers if not workload.learns(one.part)]
    of_tower, in_layers = sum(one.tower_parameters for one in frozen), sum(one.layer_parameters for one in frozen)
    of_projector = 0 if workload.learns("projector") else sum(one.projector_parameters for one in towers)
    text = 0 if workload.learns("language_model") else shape.num_parameters - shape.other_parameters
    return Frozen(in_layers, of_tower - in_layers + of_projector, text)


def _towers(shape: ModelShape) -> tuple[Tower, ...]:
    """Return the towers, if the model's parameters are those of the class that has them, and not of one for text."""
    whole = sum(one.tower_parameters + one.projector_parameters for one in shape.towers)
    return shape.towers if shape.other_parameters >= whole else ()
