"""Megatron model chunks (GPTModel) that a process holds under a layout, built without weights (`weights.py`)."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from stages.engines.megatron.spec import decoder_spec, uses_transformer_engine
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.workload import Precision

MAX_UNUSED_POSITIONS = 2**20
"""Value for Megatron's maximum number of positions. It limits nothing, since rotary angles are passed in."""


def build_model_chunks(
    shape: ModelShape,
    layout: Layout,
    precision: Precision,
    device: torch.device,
    *,
    has_adapter: bool = False,
    balances_experts: bool = False,
) -> list[GPTModel]:
    """Return this process's uninitialised model chunks in pipeline order: one, or `vpp` if interleaved."""
    transformer = transformer_config(shape, layout, precision, device, balances_experts=balances_experts)
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    return [_build_chunk(shape, transformer, vp_stage, has_adapter) for vp_stage in stages]


def freeze_routers(chunks: Sequence[GPTModel]) -> None:
    """Freeze the router weights of all mixture-of-experts layers in these model chunks."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".router." in name:
                parameter.requires_grad_(False)


def output_weight(chunk: GPTModel) -> Tensor:
    """Return the head's weight on this tensor-parallel rank, [entries, width], of the chunk that ends the model."""
    is_tied = chunk.share_embeddings_and_output_weights
    return chunk.shared_embedding_or_output_weight() if is_tied else chunk.output_layer.weight


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of parameters and activations for a recipe's precision."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def padded_vocabulary(shape: ModelShape, tp: int) -> int:
    """Return the number of embedding rows, padded (never predicted) to be equal on all tensor-parallel ranks."""
    return -(-shape.vocab_size // tp) * tp  # rounded up: 63 entries, tp 2 -> 64


def transformer_config(
    shape: ModelShape, layout: Layout, precision: Precision, device: torch.device, *, balances_experts: bool = False
) -> TransformerConfig:
    """Return Megatron's configuration of the model, its layout and its kernels."""
    dtype = compute_dtype(precision)
    return TransformerConfig(
        **_sizes(shape),
        **(_mixture(shape, dtype, balances_experts) if shape.num_experts else {}),
        **_degrees(shape, layout),
        **_recompute(layout),
        **_kernels(dtype),
        **(_eight_bits(shape) if precision == "fp8" else {}),
        **_pipeline_communication(layout, device),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        cuda_graph_scope=[],
        calculate_per_token_loss=True,  # gradients are added up, not averaged: losses come divided by the global count
        # Weights are read from files. `perform_initialization=False` would also leave out the marks of tensor-parallel
        # parameters, without which gradient norms are wrong; so they are "initialised" by leaving them alone.
        init_method=_leave_alone,
        output_layer_init_method=_leave_alone,
        embedding_init_method=_leave_alone,
    )


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers in each pipeline stage; the first have one more if the division is uneven."""
    least, rest = divmod(num_layers, num_stages)
    return [least + (stage < rest) for stage in range(num_stages)]


def _build_chunk(shape: ModelShape, config: TransformerConfig, vp_stage: int | None, has_adapter: bool) -> GPTModel:
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = GPTModel(
        config,
        decoder_spec(config, shape, vp_stage, has_adapter=has_adapter),
        vocab_size=padded_vocabulary(shape, config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions or MAX_UNUSED_POSITIONS,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="none",  # `attention.py` rotates
        vp_stage=vp_stage,
    )
    _mark_experts(chunk)
    if chunk.post_process:
        _leave_out_product(chunk.output_layer)
    return chunk


def _leave_out_product(output_layer: Any) -> None:
    """Make a chunk's head return hidden states, [tokens, 1, width], which `log_probabilities` multiplies in chunks.

    It remains the module that Megatron waits in until the head's weight is gathered. Every tensor-parallel rank gets
    all tokens' states; the backward pass sums the gradients that the ranks' entries of the vocabulary give them.
    """
    cuts_tokens = output_layer.sequence_parallel
    exchange = gather_from_sequence_parallel_region if cuts_tokens else copy_to_tensor_model_parallel_region
    output_layer.forward = lambda states, **_: (exchange(states), None)


def _mark_experts(chunk: GPTModel) -> None:
    """Mark experts' parameters so that gradients are summed only over processes that hold the same experts.

    Megatron marks them so with `ep` > 1 only; without, and with `etp` < `tp`, nothing would sum the gradients of
    tensor-parallel ranks, each of which sees its part of the tokens.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # Megatron's mark: reduced over expert-data-parallel groups


def _sizes(shape: ModelShape) -> dict[str, Any]:
    # Megatron counts the tokens before, Transformers the token itself, too.
    window = None if shape.sliding_window is None else (shape.sliding_window - 1, 0)
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "window_size": window,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _mixture(shape: ModelShape, dtype: torch.dtype, balances_experts: bool) -> dict[str, Any]:
    """Return Megatron's options for mixtures of experts, so that tokens are routed as in Transformers."""
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_size,
        "moe_layer_freq": [int(shape.is_mixture(layer)) for layer in range(shape.num_layers)],
        "moe_router_load_balancing_type": "aux_loss" if balances_experts else "none",
        "moe_aux_loss_coeff": float(balances_experts),  # how much, and of what, is for `balance.py`
        "moe_router_pre_softmax": not shape.router_normalizes,  # softmax over all experts, then the top k as they are
        "moe_grouped_gemm": uses_transformer_engine(dtype),
        "moe_token_dispatcher_type": "alltoall",  # the one that allows uneven numbers of tokens
    }


def _degrees(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if shape.num_experts else None,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "pipeline_model_parallel_layout": _uneven_stages(shape, layout),
    }


def _uneven_stages(shape: ModelShape, layout: Layout) -> list[list[str]] | None:
    """Return the layers of each pipeline stage, in order, if they do not divide evenly over stages; else None."""
    num_stages = layout.pp * layout.vpp
    if shape.num_layers % num_stages == 0:
        return None
    stages = [["decoder"] * num_layers for num_layers in layers_of_stages(shape.num_layers, num_stages)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _recompute(layout: Layout) -> dict[str, Any]:
    """Return Megatron's options for recomputation: layers (full), attention (selective; Korthikanti et al. 2022)."""
    if layout.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _kernels(dtype: torch.dtype) -> dict[str, Any]:
    """Return Megatron's options for fused kernels: Transformer Engine's, and those that torch compiles for a GPU."""
    return {
        "gradient_accumulation_fusion": False,  # needs Apex
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "use_te_activation_func": not uses_transformer_engine(dtype),  # Megatron's name for using the spec's module
        "bias_dropout_fusion": False,
        "attention_softmax_in_fp32": True,
    }


def _eight_bits(shape: ModelShape) -> dict[str, Any]:
    """Return Megatron's options for fp8: E4M3 forward, E5M2 for gradients (Micikevicius et al. 2022), current scaling.

    Delayed scaling has a state that is in no checkpoint, so that a resumed run would differ.
    """
    padding = {"moe_router_padding_for_quantization": True} if shape.num_experts else {}
    return {"fp8": "hybrid", "fp8_recipe": "tensorwise", **padding}


def _pipeline_communication(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return Megatron's options for communication between pipeline stages.

    On gloo, interleaved stages give wrong gradients, although right losses, with any other choice.
    """
    overlaps = layout.vpp > 1
    return {
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        "batch_p2p_sync": False,
        # On a CPU it would make gradients wrong, although losses are right.
        "deallocate_pipeline_outputs": device.type == "cuda",
    }


def _leave_alone(weight: Tensor) -> Tensor:
    return weight
