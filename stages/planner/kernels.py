"""Number of kernels that one layer's forward pass launches: products, attention, copies and all between them.

A test counts those of this project's engines again, on fake GPUs and in the code that Inductor generates
(`tests/fake_gpu`). Collectives are not among them.
"""

from dataclasses import dataclass

from stages.planner.adapted import adapted_layers
from stages.planner.costs import StepCase
from stages.planner.workload import ProgramTraits


@dataclass(frozen=True)
class LayerKernels:
    """Number of kernels that a layer's forward pass launches: a dense layer's, and what is added to them."""

    dense: float
    adapter: float
    """Kernels added by each linear layer's LoRA adapter."""
    experts: float
    """Kernels added where experts take the place of a dense feed-forward block."""


EAGER = LayerKernels(54, 2, 24)
"""Kernels of Transformers' layers: Qwen3's dense and mixture layers in bf16."""
COMPILED = LayerKernels(15, 2, 24)
"""Kernels of the same dense layer as one graph, with seven adapters 29. A mixture's are assumed as in an eager one."""
FUSED = LayerKernels(28, 20 / 7, 40)
"""Kernels of Megatron's dense layer. Those of its experts, which Transformer Engine computes, are assumed."""


def kernels_of(software: ProgramTraits) -> LayerKernels:
    """Return the kernels of a training program's layers."""
    if software.compiled_layers:
        return COMPILED
    return FUSED if software.fused_elementwise else EAGER


def layer_kernels(case: StepCase) -> float:
    """Return the launches of a layer's forward pass, averaged over layers, with the engine's copies of weights."""
    shape, adapter, kernels = case.shape, case.workload.adapter, kernels_of(case.software)
    adapted = sum(map(len, adapted_layers(shape, adapter))) if adapter else 0
    added = adapted * kernels.adapter + shape.num_mixture_layers * kernels.experts
    return kernels.dense + added / shape.num_layers + case.engine.weight_copies(case, adapted / shape.num_layers)
