"""Modules of Megatron's decoder layers: Transformer Engine's where installed on CUDA, else local ones.

The local are Megatron's linear layers with this project's RMSNorm and attention, since Megatron's refuse sequence
parallelism, packing and context parallelism.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn import functional

from stages.core.errors import ResourceError
from stages.engines.megatron.attention import LocalAttention, transformer_engine_attention
from stages.engines.megatron.kernels import RootMeanSquareNorm, SwiGLU
from stages.models.shape import ModelShape
from stages.parallel.engines.megatron import has_transformer_engine
from stages.planner.workload import Precision


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; on CPUs by our own kernel, since torch has a fused one for GPUs only.

    Under sequence parallelism every rank sees other tokens: the mark on the weight lets Megatron sum its gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_parameter_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, states: Tensor) -> Tensor:
        """Return RMSNorm of the states […, hidden size], in their dtype."""
        if states.is_cuda or states.dtype != torch.float32:
            return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        return RootMeanSquareNorm.apply(states, self.weight, self.eps)


@cache
def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether layers are Transformer Engine's: on CUDA, if it is installed, in bf16, which packing needs."""
    return torch.cuda.is_available() and has_transformer_engine() and dtype == torch.bfloat16


def check_precision(precision: Precision) -> None:
    """Raise ResourceError when the recipe asks for fp8 on hardware or software that cannot compute it."""
    if precision == "fp8" and not uses_transformer_engine(torch.bfloat16):
        raise ResourceError(
            "precision fp8 needs an NVIDIA GPU with 8-bit tensor cores (Hopper or later) and the package "
            "transformer-engine[pytorch], of which at least one is missing here; install it, or say `precision: bf16`"
        )


def decoder_spec(
    config: TransformerConfig, shape: ModelShape, vp_stage: int | None, *, has_adapter: bool
) -> TransformerBlockSubmodules:
    """Return the layers' specification in model chunk `vp_stage`, with explicit norms, else Megatron's own."""
    first = get_transformer_layer_offset(config, vp_stage)  # number of layers in earlier chunks
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    experts = [shape.num_experts if shape.is_mixture(layer) else None for layer in layers]
    specs = [_layer_spec(config, num_experts, has_adapter) for num_experts in experts]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(config))


def _layer_spec(config: TransformerConfig, num_experts: int | None, has_adapter: bool) -> ModuleSpec:
    options: dict[str, Any] = {"num_experts": num_experts, "qk_layernorm": config.qk_layernorm}
    if uses_transformer_engine(config.params_dtype):
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=config.moe_grouped_gemm, **options)
        spec.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
        return _with_norms_apart(spec, num_experts) if has_adapter else spec
    if num_experts:
        _bind_missing_name()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = LocalAttention
    feed_forward = layer.mlp.submodules.experts.submodules if num_experts else layer.mlp.submodules
    feed_forward.activation_func = SwiGLU
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _with_norms_apart(spec: ModuleSpec, num_experts: int | None) -> ModuleSpec:
    """Separate norms from the linear layers that Transformer Engine fuses them with, as adapters need their output."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = spec.submodules
    layer.input_layernorm = TENorm
    layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    if not num_experts:
        layer.pre_mlp_layernorm = TENorm
        layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    return spec


def _norm(config: TransformerConfig) -> type[nn.Module]:
    if not uses_transformer_engine(config.params_dtype):
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _bind_missing_name() -> None:
    """Define `te_general_gemm`, which Megatron-core 0.16.1 compares with None even where its import failed."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _parameter_device(config: TransformerConfig) -> torch.device:
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
