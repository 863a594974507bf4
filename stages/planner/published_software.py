"""How the training program of a published run worked: what its row says, else by the year of its hardware and model.
Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName
from stages.planner.hardware import Hardware
from stages.planner.published_cells import Cells
from stages.planner.workload import OURS, PlannedPrecision, Software

FIRST_YEAR_OF_FLASH = 2023
FIRST_RECORDED_MIXTURES = (26, 6)
"""Version of Megatron-Bridge whose recipes for mixtures in fp8 launch a whole step from a recording, and have tokens go
to experts beside other work; those before it do neither (scripts/performance/configs of its repository)."""
UNFUSED, FIRST_FLASH = ("unfused", "eager", "core", "none"), ("flash1", "flash-1", "fa1")
"""What a row may call its attention kernel, other than a fused one of today."""
BEFORE_FLASH = Software(
    flash_attention=False,
    dropout=True,
    gradient_bytes=2,
    optimizer_bytes=16,
    overlaps_gradients=False,
    chunked_logits=False,
    gathers_gradients=False,
    fragments_states=True,
)
BF16_BEFORE_FLASH = replace(BEFORE_FLASH, gradient_bytes=4, gradient_copy_bytes=2, optimizer_bytes=12)
"""Gradients in bf16 are too coarse to be added up: they are, in fp32, beside them."""
MODERN_MEGATRON = Software(
    overlaps_layers=True, chunked_logits=False, fused_cross_entropy=True, gathers_gradients=False
)
FP8_MEGATRON = replace(MODERN_MEGATRON, gradient_bytes=2, keeps_frozen_in_fp8=True)
"""Who goes down to fp8 adds up and reduces gradients in bf16."""
EAGER_FSDP = replace(
    OURS["fsdp"],
    chunked_logits=False,
    gathers_gradients=False,
    keeps_every_second_product=True,
    casts_at_products=False,
)
FIRST_FSDP = replace(EAGER_FSDP, first_flash_attention=True)


def software_of_run(cells: Cells, engine: EngineName, shape: ModelShape, hardware: Hardware) -> Software:
    """Of its time and kind, with what the row says of it: in the columns `kernel`, `overlap`, `overlap_gradients`,
    `cuda_graphs`, `fp8_attention`, `fp8_activations`, `fused_cross_entropy`, `compile` and `recompute_layers`, or as
    `key=value` in its note."""
    changes: dict[str, Any] = {}
    if is_compiled(cells):
        changes["fused_elementwise"] = True
    if kernel := cells.said("kernel"):
        changes["flash_attention"] = kernel not in UNFUSED
        changes["first_flash_attention"] = kernel in FIRST_FLASH
    switches = {
        "overlaps_layers": cells.switch("overlap", "tp overlap"),
        "overlaps_experts": cells.switch("overlap_experts"),
        "overlaps_gradients": cells.switch("overlap_gradients"),
        "cuda_graphs": cells.switch("cuda_graphs", "cudagraph"),
        "fused_cross_entropy": cells.switch("fused_cross_entropy", "fused cross-entropy"),
        "fp8_attention": cells.switch("fp8_attention", "fp8 attention"),
        "fp8_activation_inputs": cells.switch("fp8_activations", "activation input in fp8"),
    }
    changes |= {name: value for name, value in switches.items() if value is not None}
    if layers := cells.said("recompute_layers", "recompute layers"):
        changes["recomputed_share"] = min(1.0, int(layers) / shape.num_layers)
    return replace(_of_its_time(cells, engine, shape, hardware), **changes)


def _of_its_time(cells: Cells, engine: EngineName, shape: ModelShape, hardware: Hardware) -> Software:
    """FSDP runs eagerly (but Megatron's), FSDP1 with the first flash attention; Megatron on V100, and of GPTs on A100,
    is of the time before it (mid 2022), unless its source names a later year."""
    origin = " ".join(cells.text(column).lower() for column in ("source", "shard"))
    if engine == "fsdp" and not re.search("megatron|nemo", origin):
        return FIRST_FSDP if "fsdp1" in origin else EAGER_FSDP
    years = [int(year) for year in re.findall(r"\b20[12]\d\b", origin)]
    old = hardware.name.startswith("v100") or (hardware.name.startswith("a100") and shape.family == "gpt2")
    old = old and max(years, default=0) < FIRST_YEAR_OF_FLASH
    cells.assumed.append("attention without flash" if old else "flash attention")
    if not old:
        software = FP8_MEGATRON if precision_of(cells.text("precision")) in ("fp8", "fp4") else MODERN_MEGATRON
        version = re.search(r"megatron-bridge (\d+)\.(\d+)", origin)
        recorded = version is not None and (int(version[1]), int(version[2])) >= FIRST_RECORDED_MIXTURES
        if recorded and shape.num_experts:
            cells.assumed.append("steps launched from a recording")
            return replace(software, cuda_graphs=True, overlaps_experts=True)
        return software
    return BF16_BEFORE_FLASH if cells.text("precision").lower() == "bf16" else BEFORE_FLASH


def is_compiled(cells: Cells) -> bool:
    """Whether each layer is compiled."""
    return bool(cells.switch("compile", "compile"))


def precision_of(text: str) -> PlannedPrecision:
    """fp4, fp8, bf16 or fp32; bf16 where nothing is said."""
    lowered = text.lower()
    for few_bits in ("fp4", "fp8"):
        if few_bits in lowered:
            return few_bits
    return "fp32" if "fp32" in lowered else "bf16"
