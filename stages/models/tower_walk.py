"""Walk through the tower of a model that sees, without weights, to measure what pictures cost in it (`tower`).

Pictures are blank, and made into inputs by the model's own image processor. Pixels and activations are on the meta
device; integers, such as the sizes of a picture's grid, keep their values, by which towers cut what attends to each
other.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface
from transformers.initialization import no_init_weights

from stages.core.errors import ModelError
from stages.models.layer_kinds import PlannedSplit
from stages.models.layers import signature, text_layers, transformer_layers
from stages.models.loading import build_model, class_with_head, load_image_processor
from stages.models.parts import parts_of, tower_of
from stages.models.tower import USUAL_SIZE, Tower, TowerBytes, num_patches, patch_side
from stages.models.walk import WALKED, Walk, attend

SIZES = ((32, 32), (128, 128), (224, 224), USUAL_SIZE, (1280, 960))
"""Sizes of pictures, (width, height), between whose costs those of others lie."""
MOST_PATCHES = 2**16
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class _TowerWalk(Walk):
    """Walk on which integers have values, since they stay on the CPU; it counts pairs of patches that attend."""

    def __init__(self, num_layers: int, weights: dict[int, PlannedSplit | None], constants: set[int]) -> None:
        super().__init__(num_layers, weights, constants, num_experts=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if _makes_integers(func, args, kwargs, tensors):
            kwargs["device"] = torch.device("cpu")
        if not any(one.is_meta for one in tensors):
            return func(*args, **kwargs)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and _is_mask(args[1]):
            return args[0] if func is torch.ops.aten.index_put_.default else _chosen(args[0], *args[1])
        if not all(one.is_meta for one in tensors):
            args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def products(self) -> float:
        """Number of multiplications, those of attention included."""
        seen = [*self.seen, self.outside]
        return sum((one.weight_flops + one.state_flops) / 2 + one.attention_products for one in seen)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of all layers."""
        return sum(one.input_bytes for one in self.seen)

    @property
    def kept_in_layers(self) -> float:
        return sum(one.kept_bytes for one in self.seen)

    @property
    def kept_outside(self) -> float:
        return self.outside.kept_bytes

    @property
    def weight_products(self) -> float:
        return sum(one.weight_flops for one in (*self.seen, self.outside)) / 2


def _makes_integers(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Return whether an operation makes integers on the meta device of nothing, or of integers with values."""
    if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "meta":
        return False
    if any(one.is_meta or one.dtype.is_floating_point for one in tensors):
        return False
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else None)
    if dtype is None:
        counts = not any(isinstance(one, float) for one in tree_leaves(args))
        return func._overloadpacket is torch.ops.aten.arange and counts
    return not dtype.is_floating_point


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0].dtype == torch.bool


def _chosen(values: Tensor, mask: Tensor) -> Tensor:
    """Return what a mask leaves of values on the meta device: all, if the mask has no values either."""
    number = mask.numel() if mask.is_meta else int(mask.sum())
    return values.new_empty((number, *values.shape[mask.ndim :]), device="meta")


def walk_tower(config: Any, folder: Path) -> Tower | None:
    """Return what pictures cost in the model of a config; None if it has no tower of pictures.

    folder: with the files of its image processor; without them, the family's usual one is taken. Raises what
    Transformers raises.
    """
    if class_with_head(config, "pictures") is None:
        return None
    AttentionInterface.register(WALKED, attend)
    with no_init_weights():
        model = build_model(config, head="pictures", dtype=torch.bfloat16, attn_implementation=WALKED)
    if not hasattr(model, "get_image_features"):  # it hears alone
        return None
    model.tie_weights()
    return _Tower(model.train(), folder).measured()


@dataclass(frozen=True)
class _Picture:
    """Inputs of a tower for one picture, and the number of its patches."""

    features: Mapping[str, Tensor | None]
    num_patches: int


class _Tower:
    """Tower whose costs are measured."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        parts = parts_of(model)
        self._tower, self._projector = ([*parts[name].values()] for name in ("vision_tower", "projector"))
        seeing = {*tower_of(model).modules()}
        self._layers = [layer for layer in transformer_layers(model) if layer in seeing]
        self._marks = [repr(signature(layer)) for layer in self._layers]
        by_size = _pictures(model, folder)
        self._usual = by_size[USUAL_SIZE]
        self._pictures = [*by_size.values()]

    def measured(self) -> Tower:
        self._learn(tower=False, projector=False)
        per_patch, per_pair = _fitted(self._costs(self._pictures))
        # What grows with patches alone is measured with a picture of a usual size, as larger ones take long.
        usual = self._usual
        pixels = usual.features["pixel_values"]
        assert pixels is not None
        padded = [one for one in self._pictures if one.num_patches == usual.num_patches]
        of_projector = self._costs(padded, self._projector)[usual.num_patches] / usual.num_patches
        kept = self._kept(usual)
        self._model.float()
        return Tower(
            num_layers=len(self._layers),
            layer_parameters=sum(one.numel() for layer in self._layers for one in layer.parameters()),
            tower_parameters=sum(one.numel() for one in self._tower),
            projector_parameters=sum(one.numel() for one in self._projector),
            other_parameters=self._num_others(),
            products=per_patch - of_projector,
            projector_products=of_projector,
            pair_products=per_pair,
            patch_values=pixels.numel() / usual.num_patches,
            picture_patches=usual.num_patches,
            kept_bf16=kept,
            kept_fp32=self._kept(usual),
        )

    def _costs(self, pictures: Sequence[_Picture], weights: Sequence[Tensor] | None = None) -> dict[int, float]:
        """Return the multiplications of pictures by their number of patches. weights: only those with these weights.

        Of pictures of as many patches, the middle of the least and the most: a tower like LFM2-VL's always gets the
        same number, many of them padding, which its projector leaves out.
        """
        found: dict[int, list[float]] = {}
        for one in pictures:
            walk = self._run(one, weights)
            found.setdefault(one.num_patches, []).append(walk.weight_products if weights else walk.products)
        return {number: (min(costs) + max(costs)) / 2 for number, costs in found.items()}

    @property
    def _results(self) -> int:
        """Number of values, of a patch, that products in the tower's layers give."""
        modules = (one for layer in self._layers for one in layer.modules())
        return sum(one.out_features for one in modules if isinstance(one, nn.Linear))

    def _num_others(self) -> int:
        """Return the number of the model's parameters outside the layers of text, the embedding and the head."""
        model = self._model
        ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        inside = {*ends, *(one for layer in text_layers(model) for one in layer.parameters())}
        return sum(one.numel() for one in model.parameters() if one not in inside)

    def _kept(self, picture: _Picture) -> TowerBytes:
        self._learn(tower=True, projector=True)
        whole = self._run(picture)
        self._learn(tower=False, projector=True)
        projector = self._run(picture)
        return TowerBytes(
            layers=whole.kept_in_layers / picture.num_patches,
            inputs=whole.input_bytes / picture.num_patches,
            results=self._results * next(iter(self._tower)).element_size(),
            outside=whole.kept_outside / picture.num_patches,
            projector=(projector.kept_in_layers + projector.kept_outside) / picture.num_patches,
        )

    def _learn(self, *, tower: bool, projector: bool) -> None:
        self._model.requires_grad_(False)
        for learns, parameters in ((tower, self._tower), (projector, self._projector)):
            for one in parameters:
                one.requires_grad_(learns)

    def _run(self, picture: _Picture, weights: Sequence[Tensor] | None = None) -> _TowerWalk:
        """Walk through the tower with a picture. weights: those whose products count as such; by default all."""
        counted = {one.untyped_storage()._cdata for one in weights or self._model.parameters()}
        constants = {one.untyped_storage()._cdata for one in (*self._model.parameters(), *self._model.buffers())}
        walk = _TowerWalk(len(self._layers), dict.fromkeys(counted), constants)
        Walk.current = walk
        with walk.watching(self._layers, self._marks), saved_tensors_hooks(walk.pack, lambda kept: kept), walk:
            self._call(picture)
        return walk

    def _call(self, picture: _Picture) -> None:
        dtype = next(self._model.parameters()).dtype
        given = {
            name: value.to("meta", dtype) if value is not None and value.is_floating_point() else value
            for name, value in picture.features.items()
        }
        self._model.get_image_features(**given)


def _pictures(model: Any, folder: Path) -> dict[tuple[int, int], _Picture]:
    """Return the inputs of blank pictures by their sizes, (width, height), without those of too many patches."""
    from PIL import Image

    processor, side = load_image_processor(model.config, folder), patch_side(model.config)
    asked = inspect.signature(model.get_image_features).parameters
    # Such as Llama 4's, which its forward pass leaves open.
    unset = {name: None for name, one in asked.items() if one.default is Parameter.empty and one.kind in NAMED}
    by_size = {}
    for size in SIZES:
        given = processor([Image.new("RGB", size)], return_tensors="pt")
        features = {name: value for name, value in given.items() if name in asked and isinstance(value, Tensor)}
        number = num_patches(features["pixel_values"].shape, side)
        if number <= MOST_PATCHES:
            by_size[size] = _Picture(unset | features, number)
    return by_size


def _fitted(costs: Mapping[int, float]) -> tuple[float, float]:
    """Return a and b ≥ 0 for which a × patches + b × patches² is nearest to the costs, each relative to itself."""
    rows = [(number / cost, number**2 / cost) for number, cost in costs.items() if cost]
    if not rows:
        raise ModelError("measuring what pictures cost: the model's tower does nothing with a blank picture")
    aa, ab, bb = (sum(one[i] * one[j] for one in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(one[i] for one in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    per_pair = (aa * b1 - ab * a1) / determinant if len(rows) > 1 else 0.0
    if per_pair <= 0:
        return a1 / aa, 0.0
    return (a1 - ab * per_pair) / aa, per_pair
