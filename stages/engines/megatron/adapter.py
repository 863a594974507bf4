"""PEFT's LoRA adapter on a Megatron model: which layers are adapted, initial values, and each process's share.

PEFT itself chooses the layers and draws A, so that it is the adapter that the FSDP engine would train. Which part of a
factor a process holds follows from its layer (`families`, `parameter_shards`); the computation is in `low_rank`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from stages.adapters.config import AdapterConfig
from stages.adapters.effect import join_experts, split_experts
from stages.adapters.files import INNER, check_mergeable
from stages.adapters.lora import (
    ADAPTER_NAME,
    adapted_layers,
    adapted_parameters,
    add_adapter,
    changed_weights,
    load_trained_adapter,
    read_start,
)
from stages.core.errors import ModelError
from stages.engines.megatron.families import TensorParallelCut, expert_layer, factor_name
from stages.engines.megatron.low_rank import ExpertChange, LowRankChange, adapt_router
from stages.engines.megatron.parameter_shards import ParameterShard, local_parameter_shards
from stages.engines.megatron.weights import named_weights
from stages.models.flops import ModelFlops
from stages.models.loading import model_without_weights
from stages.models.shape import ModelShape

NUM_NAMED = 5
INWARD = "gate_up_proj"
OF_EXPERT = re.compile(factor_name(expert_layer(r"(?P<layer>.*\.experts(\.base_layer)?)", r"\d+"), "(?P<factor>[AB])"))


@dataclass(frozen=True)
class PeftAdapter:
    """Adapter that PEFT would put on the Transformers model in a folder: its layers and initial values."""

    config: dict[str, Any]
    layers: Mapping[str, tuple[int, float]]
    """LoRA rank and scaling of each adapted layer, by the layer's name in the Transformers model."""
    first_values: Mapping[str, Tensor]
    """Initial LoRA factors, fp32 by parameter name: A [rank, in] and B [out, rank] of each layer or expert."""

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of the adapter, over all processes."""
        return sum(value.numel() for value in self.first_values.values())

    def size_of(self, names: Iterable[str]) -> tuple[int, float]:
        """Return LoRA rank and scaling of a layer that fuses the Transformers layers `names`, not all adapted."""
        return next(self.layers[name] for name in names if name in self.layers)

    @property
    def dropout(self) -> float:
        """Dropout probability of the inputs of LoRA's A."""
        return float(self.config["lora_dropout"])

    def flops(self, base: ModelFlops) -> ModelFlops:
        """Return the FLOPs of the base model with the adapter, given the base model's FLOPs."""
        frozen = base.layer_parameters
        parameters = frozen + self.num_parameters
        return replace(base, layer_parameters=parameters, frozen_layer_parameters=frozen, is_head_frozen=True)


def peft_adapter(folder: Path, config: AdapterConfig, seed: int, start: Path | None = None) -> PeftAdapter:
    """Return the adapter that PEFT creates for the model in `folder`, without loading the model's weights.

    start: folder of an adapter whose values are taken. Raises ModelError as `add_adapter` and `read_start` do.
    """
    # PEFT draws A into real memory, so the model leaves `meta`; the base's values are never written.
    causal_lm = model_without_weights(folder, dtype=torch.float32)
    causal_lm.to_empty(device="cpu")
    causal_lm.tie_weights()
    lora = add_adapter(causal_lm, config, seed)
    parameters = adapted_parameters(causal_lm)
    # PEFT wraps an expert layer's matrices one inside the other: `gate_up_proj` is outermost where it is alone.
    if alone := [name for layer, name in parameters.items() if not layer.endswith(INNER) and name.endswith(INWARD)]:
        raise ModelError(
            f"putting an adapter on a model with engine megatron: it has none for {alone[0]} without one for "
            "down_proj; name both, or say `engine: fsdp`"
        )
    check_mergeable(changed_weights(causal_lm), folder)
    if start:
        load_trained_adapter(causal_lm, read_start(start, folder))
    layers = adapted_layers(causal_lm)
    return PeftAdapter(
        config=lora.to_dict(),
        layers={name: (layer.r[ADAPTER_NAME], layer.scaling[ADAPTER_NAME]) for name, layer in layers.items()},
        first_values=dict(_first_values(causal_lm)),
    )


def learned_factors(chunks: Sequence[GPTModel], model: ModelShape) -> dict[str, Tensor]:
    """Return the trained LoRA factors, fp32, by PEFT's names, on rank 0's CPU; other ranks get none. Collective."""
    factors: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], list[Tensor]] = {}
    for name, weight in named_weights(chunks, model, torch.float32, learning_only=True):
        if of_expert := OF_EXPERT.fullmatch(name):  # they come in the order of their numbers
            experts.setdefault((of_expert["layer"], of_expert["factor"]), []).append(weight)
        else:
            factors[name] = weight
    for (layer, factor), weights in experts.items():
        factors[factor_name(layer, factor)] = join_experts(torch.stack(weights), factor)
    return factors


def adapt(chunks: Sequence[GPTModel], model: ModelShape, adapter: PeftAdapter) -> None:
    """Freeze the weights of this process's model chunks, and add its share of the adapter. Collective.

    Raises ModelError for layers on which Megatron has no adapters.
    """
    # Before factors are added: only parameters of the base are looked up.
    owners = {
        weight: (module, name)
        for chunk in chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    frozen = list(local_parameter_shards(chunks, model))  # a list, since `_adapt` adds parameters
    for chunk in chunks:
        chunk.requires_grad_(False)
        # With a frozen embedding nothing that enters the first layer needs a gradient. Full recomputation then skips
        # the backward pass: the loss stays and gradients are 0, without an error (Megatron-core 0.16.1).
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_need_gradients)
    for part, weight in frozen:
        if not adapter.layers.keys().isdisjoint(part.layer_names()):
            _adapt(*owners[weight], part, adapter, model)
    # Collective: each process has filled some factors, and all of PEFT's must be filled by one at least.
    _check_found(_fill(chunks, model, adapter), adapter)


def seed_dropout(adapter: PeftAdapter) -> None:
    """Seed dropout: different on each process, but equal on tensor-parallel ranks where they see the same tokens.

    It follows from the step's seed (`torch.manual_seed`), so that a resumed run drops the same inputs.
    """
    if adapter.dropout:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        place = parallel_state.get_context_parallel_rank() * stages + stage
        # 2^33: seeds of steps are below 2^32, and Megatron adds small numbers for its tensor-parallel and expert ranks.
        model_parallel_cuda_manual_seed(torch.initial_seed() + place * 2**33, force_reset_rng=True)


def _adapt(module: nn.Module, weight: str, part: ParameterShard, adapter: PeftAdapter, model: ModelShape) -> None:
    """Add LoRA factors to the Megatron module that holds an adapted weight (`weight`, of which it has `part`)."""
    names, is_column = part.layer_names(), part.rule.cut is not TensorParallelCut.COLUMNS
    rank, scaling = adapter.size_of(names)
    if part.rule.of_experts:
        ExpertChange(scaling, is_column).put_on(module, weight, rank)
    elif part.rule.cut is TensorParallelCut.WHOLE:
        adapt_router(module, rank, scaling)
    else:
        _adapt_layer(module, part, names, adapter, model)


def _adapt_layer(
    layer: nn.Module, part: ParameterShard, names: list[str], adapter: PeftAdapter, model: ModelShape
) -> None:
    """Add LoRA factors to a linear layer, of whose weight `part` is here. names: Transformers layers joined in it."""
    rank, scaling = adapter.size_of(names)
    change = LowRankChange(
        scaling=scaling,
        dropout=adapter.dropout,
        is_column=part.rule.cut is not TensorParallelCut.COLUMNS,
        cuts_tokens=layer.config.sequence_parallel,
        num_joined=len(names),
        mask=_mask(part, names, adapter, model).to(layer.weight) if len(names) > 1 else None,
    )
    for factor, parameter in zip("AB", change.put_on(layer, rank), strict=True):
        # Read by `local_parameter_shards`: joined layers without an adapter have factors here, but not in the
        # Transformers model.
        parameter.left_out = frozenset(factor_name(name, factor) for name in names if name not in adapter.layers)


def _mask(part: ParameterShard, names: list[str], adapter: PeftAdapter, model: ModelShape) -> Tensor:
    """Return the mask [rows, joined × rank] by which q, k and v of a fused layer use only their own A."""
    rank, _ = adapter.size_of(names)
    mask = torch.zeros(part.shape[0], len(names) * rank)
    for piece in part.pieces(model):
        name = piece.weight.removesuffix(".weight")
        if name in adapter.layers:
            first = names.index(name) * rank  # the columns of this layer's A
            mask[piece.of_parameter()][:, first : first + rank] = 1
    return mask


def _fill(chunks: Sequence[GPTModel], model: ModelShape, adapter: PeftAdapter) -> set[str]:
    """Copy initial values into this process's slices of LoRA factors; return the names of the filled factors."""
    filled: set[str] = set()
    for part, parameter in local_parameter_shards(chunks, model):
        if parameter.requires_grad:
            for piece in part.pieces(model):
                parameter.data[piece.of_parameter()].copy_(adapter.first_values[piece.weight][piece.of_weight()])
                filled.add(piece.weight)
    return filled


def _check_found(mine: set[str], adapter: PeftAdapter) -> None:
    everyones: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    if lost := sorted(adapter.first_values.keys() - set().union(*everyones)):
        raise ModelError(
            f"putting an adapter on a model with engine megatron: it has none for {len(lost)} factors that PEFT has "
            f"({', '.join(lost[:NUM_NAMED])}); leave these layers out with adapter.exclude_modules, or say "
            "`engine: fsdp`"
        )


def _first_values(causal_lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield initial values of LoRA factors by name; a factor that PEFT stores for all experts is split by expert."""
    layers = adapted_layers(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        if not parameter.requires_grad:
            continue
        layer, _, end = name.partition(".lora_")
        num_experts = getattr(layers[layer], "num_experts", 1)
        if num_experts == 1:
            yield name, parameter.detach()
            continue
        for expert, value in enumerate(split_experts(parameter.detach(), num_experts, end[0])):
            yield factor_name(expert_layer(layer, expert), end[0]), value


def _need_gradients(_: nn.Module, __: Any, output: Tensor) -> None:
    output.requires_grad_()
