"""Matrix products in 8 bits under FSDP2: linear layers are replaced by torchao's float8 layers.

Operands are cast to 8 bits before each product, forward and backward; all else stays as in bf16, and so do checkpoints
and the export. Not replaced: the head and embeddings, adapters, routers, layers that the architecture keeps in fp32,
layers that cuBLAS cannot multiply in 8 bits, and experts, whose weights are no linear layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages.core.errors import ModelError, ResourceError
from stages.engines.fsdp.moe import routers_of
from stages.engines.settings import Fp8Recipe
from stages.models.loaded_weights import modules_kept_in_fp32
from stages.parallel.engines.fsdp import FsdpRules

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MULTIPLE = 16
"""Number that must divide a layer's input and output sizes for matrix products in 8 bits (cuBLAS)."""


def float8_config(recipe: Fp8Recipe) -> Float8LinearConfig:
    """Return torchao's float8 config for scales per tensor or per row; ResourceError where it is not installed."""
    if missing := FsdpRules().missing_package("fp8"):
        raise ResourceError(missing)
    from torchao.float8 import Float8LinearConfig

    # Gradients of weights are products along the tokens, which need not be a multiple of 16.
    return replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)


def multiply_in_eight_bits(causal_lm: Any, config: Float8LinearConfig) -> str:
    """Replace linear layers that can multiply in 8 bits by torchao's float8 layers, keeping weights and names.

    Returns a sentence with the numbers of replaced and other layers. Raises ModelError where no layer can.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    reasons = float8_exclusions(causal_lm)
    chosen = {name for name, reason in reasons.items() if not reason}
    counts = Counter(reason for reason in reasons.values() if reason)
    kept = ", ".join(f"{number} {reason}" for reason, number in counts.items()) or "none"
    if not chosen:
        raise ModelError(
            f"`precision: fp8` is of linear layers, and {type(causal_lm).__name__} has none that can multiply in 8 "
            f"bits (left out: {kept}); say `precision: bf16`"
        )
    convert_to_float8_training(causal_lm, config=config, module_filter_fn=lambda _, name: name in chosen)
    converted = sum(isinstance(module, Float8Linear) for module in causal_lm.modules())
    assert converted == len(chosen), (converted, len(chosen))
    scales = "rows" if config.cast_config_weight.scaling_granularity.value == "axiswise" else "whole tensors"
    return f"{converted} linear layers multiply in 8 bits, with scales of {scales}; left in bf16: {kept}"


def float8_exclusions(causal_lm: Any) -> dict[str, str | None]:
    """Return, by layer name, why a linear layer must stay in bf16; None for a layer that can multiply in 8 bits."""
    head = causal_lm.get_output_embeddings()
    routers = {id(part) for router in routers_of(causal_lm) for part in router.modules()}
    in_fp32 = {id(part) for kept in modules_kept_in_fp32(causal_lm, torch.bfloat16)[0] for part in kept.modules()}

    def reason(name: str, module: nn.Linear) -> str | None:
        if module is head:
            return "head"
        if ".lora_" in name:
            return "of adapters"
        if id(module) in routers:
            return "in routers"
        if id(module) in in_fp32:
            return "that the architecture keeps in fp32"
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            return f"with a size that is no multiple of {MULTIPLE}"
        return None if type(module) is nn.Linear else f"of the type {type(module).__name__}"

    return {name: reason(name, part) for name, part in causal_lm.named_modules() if isinstance(part, nn.Linear)}
