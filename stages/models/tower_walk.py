"""Walk through the towers of a model, without weights, to measure what pictures and sounds cost in them (`tower`).

Media are blank, and made into inputs by the model's own processor. Pixels, spectrograms and activations are on the meta
device; integers, such as the sizes of a picture's grid, keep their values, by which towers cut what attends to each
other.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from stages.models.layers import signature, text_layers, transformer_layers
from stages.models.loading import build_model, class_with_head, load_feature_extractor, load_image_processor
from stages.models.media import TOWERS, ModelPart
from stages.models.parts import parts_of, passed_by, towers_of
from stages.models.split_states import PlannedWeight
from stages.models.tower import (
    SPECTROGRAM,
    USUAL_SECONDS,
    USUAL_SIZE,
    Tower,
    TowerBytes,
    num_frames,
    num_patches,
    patch_side,
)
from stages.models.walk import WALKED, Walk, attend

SIZES = ((32, 32), (128, 128), (224, 224), USUAL_SIZE, (1280, 960))
"""Sizes of pictures, (width, height), between whose costs those of others lie."""
SECONDS = (1, 4, USUAL_SECONDS, 30)
"""Lengths of sounds between whose costs those of others lie."""
MOST_PATCHES = 2**16
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class _TowerWalk(Walk):
    """Walk on which integers have values, since they stay on the CPU; it counts pairs of patches that attend."""

    def __init__(self, num_layers: int, weights: dict[int, PlannedWeight], constants: set[int]) -> None:
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


def walk_towers(config: Any, folder: Path) -> Iterator[Callable[[], Tower]]:
    """Yield what measures the costs of each tower of the model of a config; nothing if it reads text alone.

    folder: with the files of its processor; without them, the family's usual one is taken. Each raises what
    Transformers raises.
    """
    if class_with_head(config, "pictures") is None:
        return
    AttentionInterface.register(WALKED, attend)
    with no_init_weights():
        model = build_model(config, head="pictures", dtype=torch.bfloat16, attn_implementation=WALKED)
    model.tie_weights()
    model.train()
    for part in towers_of(model):
        yield partial(_measured, model, folder, part)


@dataclass(frozen=True)
class _Medium:
    """Inputs of a tower for one picture or sound, the name of its pixels or spectrogram, and its number of patches."""

    features: Mapping[str, Tensor | None]
    values: str
    num_patches: int


def _measured(model: Any, folder: Path, part: ModelPart) -> Tower:
    return _Tower(model, folder, part).measured()


class _ReachedTextError(Exception):
    """Raised where a medium has passed all that is before the layers of text."""


class _Tower:
    """Tower whose costs are measured."""

    def __init__(self, model: Any, folder: Path, part: ModelPart) -> None:
        self._model, self._part = model, part
        model.to(torch.bfloat16)
        parts, passed = parts_of(model), passed_by(model, [TOWERS[part]])
        self._tower = [*parts[part].values()]
        of_projector = {name: one for name, one in parts["projector"].items() if name not in passed}
        self._projector = [*of_projector.values()]
        tower = towers_of(model)[part]
        inside = {*tower.modules()}
        self._layers = [layer for layer in transformer_layers(model) if layer in inside]
        self._marks = [repr(signature(layer)) for layer in self._layers]
        self._behind = [one for one in _outermost(model, of_projector) if one not in inside]
        self._features = getattr(model, f"get_{TOWERS[part]}_features", None)
        usual, media = MEDIA[part](model, folder)
        self._media = [one for one in media if one.num_patches <= MOST_PATCHES]
        self._usual = usual

    def measured(self) -> Tower:
        self._learn(tower=False, projector=False)
        per_patch, per_pair = _fitted(self._costs(self._media))
        # What grows with patches alone is measured with a medium of a usual size, as larger ones take long.
        usual = self._usual
        values = usual.features[usual.values]
        assert values is not None
        padded = [one for one in self._media if one.num_patches == usual.num_patches]
        of_projector = self._costs(padded, self._projector)[usual.num_patches] / usual.num_patches
        kept = self._kept(usual)
        self._model.float()
        return Tower(
            part=self._part,
            num_layers=len(self._layers),
            layer_parameters=sum(one.numel() for layer in self._layers for one in layer.parameters()),
            tower_parameters=sum(one.numel() for one in self._tower),
            projector_parameters=sum(one.numel() for one in self._projector),
            other_parameters=self._num_others(),
            products=per_patch - of_projector,
            projector_products=of_projector,
            pair_products=per_pair,
            patch_values=values.numel() / usual.num_patches,
            usual_patches=usual.num_patches,
            kept_bf16=kept,
            kept_fp32=self._kept(usual),
        )

    def _costs(self, media: Sequence[_Medium], weights: Sequence[Tensor] | None = None) -> dict[int, float]:
        """Return the multiplications of media by their number of patches. weights: only those with these weights.

        Of media of as many patches, the middle of the least and the most: a tower like LFM2-VL's always gets the
        same number, many of them padding, which its projector leaves out.
        """
        found: dict[int, list[float]] = {}
        for one in media:
            walk = self._run(one, weights)
            found.setdefault(one.num_patches, []).append(walk.weight_products if weights else walk.products)
        return {number: (min(costs) + max(costs)) / 2 for number, costs in found.items()}

    def _results(self, walk: _TowerWalk) -> float:
        """Return the number of values that products in the tower's layers give, of all vectors that layers take."""
        total, value_bytes = 0.0, next(iter(self._tower)).element_size()
        for layer, seen in zip(self._layers, walk.seen, strict=True):
            products = [one for one in layer.modules() if isinstance(one, nn.Linear)]
            if products:
                vectors = seen.input_bytes / value_bytes / products[0].in_features
                total += vectors * sum(one.out_features for one in products)
        return total

    def _num_others(self) -> int:
        """Return the number of the model's parameters outside the layers of text, the embedding and the head."""
        model = self._model
        ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        inside = {*ends, *(one for layer in text_layers(model) for one in layer.parameters())}
        return sum(one.numel() for one in model.parameters() if one not in inside)

    def _kept(self, medium: _Medium) -> TowerBytes:
        self._learn(tower=True, projector=True)
        whole = self._run(medium)
        self._learn(tower=False, projector=True)
        projector = self._run(medium)
        return TowerBytes(
            layers=whole.kept_in_layers / medium.num_patches,
            inputs=whole.input_bytes / medium.num_patches,
            results=self._results(whole) * next(iter(self._tower)).element_size() / medium.num_patches,
            outside=whole.kept_outside / medium.num_patches,
            projector=(projector.kept_in_layers + projector.kept_outside) / medium.num_patches,
        )

    def _learn(self, *, tower: bool, projector: bool) -> None:
        self._model.requires_grad_(False)
        for learns, parameters in ((tower, self._tower), (projector, self._projector)):
            for one in parameters:
                one.requires_grad_(learns)

    def _run(self, medium: _Medium, weights: Sequence[Tensor] | None = None) -> _TowerWalk:
        """Walk through the tower with a medium. weights: those whose products count as such; by default all."""
        counted = {one.untyped_storage()._cdata for one in weights or self._model.parameters()}
        constants = {one.untyped_storage()._cdata for one in (*self._model.parameters(), *self._model.buffers())}
        walk = _TowerWalk(len(self._layers), dict.fromkeys(counted, PlannedWeight("")), constants)
        Walk.current = walk
        with walk.watching(self._layers, self._marks), saved_tensors_hooks(walk.pack, lambda kept: kept), walk:
            self._call(medium)
        return walk

    def _call(self, medium: _Medium) -> None:
        dtype = next(self._model.parameters()).dtype
        given = {
            name: value.to("meta", dtype) if value is not None and value.is_floating_point() else value
            for name, value in medium.features.items()
        }
        if self._features:
            self._features(**given)
            return
        # A model without such a method (Qwen2-Audio) has it in its forward pass, which ends here before the text.
        with self._ends_behind_the_projector(), suppress(_ReachedTextError):
            self._model(input_ids=torch.zeros(1, 2, dtype=torch.int64), **given)
            raise ModelError("measuring what media cost: the model's projector did not run")

    @contextmanager
    def _ends_behind_the_projector(self) -> Iterator[None]:
        waiting = {*self._behind}

        def ran(module: nn.Module, *_: Any) -> None:
            waiting.discard(module)
            if not waiting:
                raise _ReachedTextError

        with ExitStack() as stack:
            for one in self._behind:
                stack.callback(one.register_forward_hook(ran).remove)
            yield


def _outermost(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[nn.Module]:
    """Return the largest modules that hold no other than these parameters."""
    largest: list[nn.Module] = []
    todo = [model]
    while todo:
        module = todo.pop()
        own = {id(one) for one in module.parameters()}
        if own and own <= {id(one) for one in parameters.values()}:
            largest.append(module)
        else:
            todo += module.children()
    return largest


def _pictures(model: Any, folder: Path) -> tuple[_Medium, list[_Medium]]:
    """Return the inputs of a blank picture of a usual size, and of all sizes."""
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
        by_size[size] = _Medium(unset | features, "pixel_values", number)
    return by_size[USUAL_SIZE], [*by_size.values()]


def _sounds(model: Any, folder: Path) -> tuple[_Medium, list[_Medium]]:
    """Return the inputs of a blank sound of a usual length, and of all lengths."""
    import numpy as np

    extractor = load_feature_extractor(model.config, folder)
    method = getattr(model, "get_audio_features", model.forward)
    asked = inspect.signature(method).parameters
    rate, by_length = extractor.sampling_rate, {}
    for seconds in SECONDS:
        given = extractor(
            [np.zeros(seconds * rate, np.float32)],
            sampling_rate=rate,
            return_attention_mask=True,
            return_tensors="pt",
        )
        features = {SPECTROGRAM: given[SPECTROGRAM]}
        mask = next(value for name, value in given.items() if name.endswith("mask"))
        features |= {name: mask for name in asked if name.endswith("mask") and name != "attention_mask"}
        number = num_frames(features[SPECTROGRAM].shape, extractor.feature_size)
        by_length[seconds] = _Medium(features, SPECTROGRAM, number)
    return by_length[USUAL_SECONDS], [*by_length.values()]


MEDIA: dict[ModelPart, Callable[[Any, Path], tuple[_Medium, list[_Medium]]]] = {
    "vision_tower": _pictures,
    "audio_tower": _sounds,
}
"""Function that makes the media of a tower: one of a usual size, and one of each size."""


def _fitted(costs: Mapping[int, float]) -> tuple[float, float]:
    """Return a and b ≥ 0 for which a × patches + b × patches² is nearest to the costs, each relative to itself."""
    rows = [(number / cost, number**2 / cost) for number, cost in costs.items() if cost]
    if not rows:
        raise ModelError("measuring what media cost: the model's tower does nothing with a blank one")
    aa, ab, bb = (sum(one[i] * one[j] for one in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(one[i] for one in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    per_pair = (aa * b1 - ab * a1) / determinant if len(rows) > 1 else 0.0
    if per_pair <= 0:
        return a1 / aa, 0.0
    return (a1 - ab * per_pair) / aa, per_pair
