"""LoRA adapter in memory: merging into the base model's weights, and addition of several adapters to one.

B A of rank r and D C of rank s add up to [B D] [A; C] of rank r + s. Factors may be large where the sum is small
(PiSSA: learned minus taken out), and lose what was learned when rounded to bf16; so they are made again from the sum's
singular value decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


A_END, B_END = ".lora_A.default.weight", ".lora_B.default.weight"
Factors = list[tuple["Tensor", "Tensor"]]


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter as read from disk: its factors, their scaling, and weights trained as a whole.

    factors: A [rank, in] and B [out, rank], by name of a layer in the Transformers model.
    """

    base: str
    """Artifact (stage and version) of the base model that the adapter was trained on."""
    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    is_transposed: bool
    """True if the base model stores weights as [in, out], as GPT-2 does."""
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    """Length of each row of a layer's merged weight, [out], by layer name (DoRA only)."""
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights that replace those of the base model, by name: trained as a whole (PEFT's `modules_to_save`)."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters outside linear layers (experts), by LoRA layer: A [experts, rank, in], B [experts, out, rank]."""
    scalings: Mapping[str, float] = field(default_factory=dict)
    """Scaling of each LoRA layer whose scaling differs from the adapter's, by layer name."""

    @property
    def rank(self) -> int:
        return max(a.shape[-2] for a, _ in self.factors.values())  # [-2]: A may be [experts, rank, in]

    @property
    def has_own_ranks(self) -> bool:
        """Return whether the adapter's linear layers have different LoRA ranks."""
        return len({len(a) for layer, (a, _) in self.factors.items() if layer not in self.parameters}) > 1

    def scaling_of(self, layer: str) -> float:
        """Return the factor by which B A x is multiplied in a LoRA layer."""
        return self.scalings.get(layer, self.scaling)

    @property
    def weights(self) -> set[str]:
        """Names of the base model's weights that merging changes, except parameters outside linear layers."""
        return {*(f"{layer}.weight" for layer in self.layers), *self.saved}

    @property
    def layers(self) -> set[str]:
        return set(self.factors) - set(self.parameters)

    @property
    def is_sum(self) -> bool:
        """Return whether the adapter only adds scaling · B A x: no DoRA, saved modules or adapted parameters."""
        return not self.magnitudes and not self.saved and not self.parameters

    def shape_of(self, name: str) -> list[int]:
        if name in self.saved:
            return list(self.saved[name].shape)
        a, b = self.factors[name.removesuffix(".weight")]
        return [a.shape[1], b.shape[0]] if self.is_transposed else [b.shape[0], a.shape[1]]

    def change(self, layer: str) -> Tensor:
        """Return scaling · B A in a layer's weight's shape (experts: [experts, out, in]), fp32; DoRA does more."""
        a, b = self.factors[layer]
        product = self.scaling_of(layer) * (b.float() @ a.float())
        return product.T if self.is_transposed else product

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a base weight with the adapter merged, fp32; raise ModelError for a weight of another shape."""
        layer = name.removesuffix(".weight")
        change = self.saved[name].float() if name in self.saved else self.change(layer)
        if change.shape != weight.shape:
            raise ModelError(
                f"merging {layer}: the adapter changes a weight of {tuple(change.shape)}, the model's is "
                f"{tuple(weight.shape)}; they do not belong together"
            )
        if name in self.saved:
            return change
        merged = weight.float() + change
        if layer not in self.magnitudes:
            return merged
        # DoRA: each row of the merged weight is scaled to its own learned length.
        along_row = 0 if self.is_transposed else 1
        length = self.magnitudes[layer].float().unsqueeze(along_row)
        return merged * (length / merged.norm(dim=along_row, keepdim=True))


def of_unchanged_base(
    parameters: Mapping[str, Tensor], config: Mapping[str, Any], initial: Mapping[str, Tensor], merged: Adapter | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert an adapter trained on a changed base model (PiSSA, OLoRA, or a merged adapter) to the unchanged base.

    parameters: what was learned, by names such as `LAYER.lora_A.default.weight`. initial: what was taken out of the
    base, likewise. merged: an adapter that was merged into the base.
    """
    learned = {name.removesuffix(A_END) for name in parameters if name.endswith(A_END)}
    before = set(merged.factors) if merged else set()
    # The sum of ranks: what was learned, what was taken out of the base, and the merged adapter's.
    rank = config["r"] * (2 if initial else 1) + (merged.rank if merged else 0)
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    # With the larger rank, alpha grows so that the scaling stays the one of training.
    alpha = scaling * (math.sqrt(rank) if config.get("use_rslora") else rank)
    summed = {**(merged.saved if merged else {}), **parameters}
    for layer in sorted(learned | before):
        parts: Factors = [(parameters[layer + A_END], parameters[layer + B_END])] if layer in learned else []
        # The base lacked the initial factors in training; the unchanged base has them, so they are subtracted.
        parts += [(initial[layer + A_END], -initial[layer + B_END])] if initial and layer in learned else []
        if merged and layer in before:
            a, b = merged.factors[layer]
            # The written adapter has one scaling for all parts.
            parts.append((a.float(), b.float() * (merged.scaling_of(layer) / scaling)))
        summed[layer + A_END], summed[layer + B_END] = _added_up(parts, rank)
    written = {**config, "r": rank, "lora_alpha": alpha, "init_lora_weights": True}
    if merged and merged.saved:
        ends = {name.rpartition(".")[0] for name in merged.saved}
        written["modules_to_save"] = sorted({*(config.get("modules_to_save") or ()), *ends})
    if before and before != learned:
        written |= {"target_modules": sorted(learned | before), "exclude_modules": None, "layers_to_transform": None}
    return summed, written


def _added_up(parts: Factors, rank: int) -> tuple[Tensor, Tensor]:
    """Return fp32 LoRA factors, A [rank, in] and B [out, rank], whose product is the sum of several pairs'."""
    import torch
    from torch.nn import functional

    # [B D] [A; C] = Q₁ R₁ (Q₂ R₂)ᵀ: the decomposition is of R₁ R₂ᵀ, at most [ranks, ranks], and not of [out, in].
    # In float64, since the parts may nearly cancel. left: [out, ranks], right: [in, ranks].
    left, left_triangle = torch.linalg.qr(torch.cat([b for _, b in parts], 1).double())
    right, right_triangle = torch.linalg.qr(torch.cat([a for a, _ in parts]).double().T)
    inner_left, sizes, inner_right = torch.linalg.svd(left_triangle @ right_triangle.T, full_matrices=False)
    # √size on either side: both factors get numbers of like magnitude
    b = left @ inner_left * sizes.sqrt()
    a = sizes.sqrt()[:, None] * (inner_right @ right.T)
    lacking = rank - len(sizes)  # where the layer is narrower than the rank, or only some of the changes are of it
    return functional.pad(a, (0, 0, 0, lacking)).float(), functional.pad(b, (0, lacking)).float()
