"""Low-rank changes of one weight, added up → one adapter: what was learned, taken out of the base, merged into it.

B A of rank r and D C of rank s add up to [B D] [A; C] of rank r + s. Its factors may be large where the sum is small
(PiSSA: learned minus taken out), and what was learned would be lost when they are rounded to bf16; so they are made
again from the sum's singular value decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from stages.adapters.adapter import Adapter

A_END, B_END = ".lora_A.default.weight", ".lora_B.default.weight"
Factors = list[tuple["Tensor", "Tensor"]]


def of_unchanged_base(
    parameters: Mapping[str, Tensor], config: Mapping[str, Any], initial: Mapping[str, Tensor], merged: Adapter | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and PEFT's config of one adapter of the base as it is in its folder.

    parameters: what was learned, `LAYER.lora_A.default.weight` → tensor; initial: what was taken out of the base, by
    the same names; merged: an adapter that was merged into it.
    """
    learned = {name.removesuffix(A_END) for name in parameters if name.endswith(A_END)}
    before = set(merged.factors) if merged else set()
    rank = config["r"] * (2 if initial else 1) + (merged.rank if merged else 0)
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    alpha = scaling * (math.sqrt(rank) if config.get("use_rslora") else rank)
    found = {**(merged.saved if merged else {}), **parameters}
    for layer in sorted(learned | before):
        parts: Factors = [(parameters[layer + A_END], parameters[layer + B_END])] if layer in learned else []
        parts += [(initial[layer + A_END], -initial[layer + B_END])] if initial and layer in learned else []
        if merged and layer in before:
            a, b = merged.factors[layer]
            parts.append((a.float(), b.float() * (merged.scaling_of(layer) / scaling)))
        found[layer + A_END], found[layer + B_END] = _added_up(parts, rank)
    written = {**config, "r": rank, "lora_alpha": alpha, "init_lora_weights": True}
    if merged and merged.saved:
        ends = {name.rpartition(".")[0] for name in merged.saved}
        written["modules_to_save"] = sorted({*(config.get("modules_to_save") or ()), *ends})
    if before and before != learned:
        written |= {"target_modules": sorted(learned | before), "exclude_modules": None, "layers_to_transform": None}
    return found, written


def _added_up(parts: Factors, rank: int) -> tuple[Tensor, Tensor]:
    """fp32 A [rank, in] and B [out, rank] whose product is the sum of the parts'."""
    import torch
    from torch.nn import functional

    left, left_triangle = torch.linalg.qr(torch.cat([b for _, b in parts], 1).double())
    right, right_triangle = torch.linalg.qr(torch.cat([a for a, _ in parts]).double().T)
    inner_left, sizes, inner_right = torch.linalg.svd(left_triangle @ right_triangle.T, full_matrices=False)
    b = left @ inner_left * sizes.sqrt()
    a = sizes.sqrt()[:, None] * (inner_right @ right.T)
    lacking = rank - len(sizes)  # where the layer is narrower than the rank, or only some of the changes are of it
    return functional.pad(a, (0, 0, 0, lacking)).float(), functional.pad(b, (0, lacking)).float()
