"""LoRA on tensor-parallel linear layers, W x + scaling B A x; only tensors as narrow as the LoRA rank are exchanged.

                                      A                                B
    column (rows of W are cut)        whole on every rank              its rows, like W's
    row (columns of W are cut)        its columns, like W's            whole on every rank

Column: each rank multiplies A x by its rows of B, and the gradient of A x is summed: by an all-reduce, or, when tokens
are cut too (sequence parallelism), A x is gathered and its gradient reduce-scattered. Row: each rank has a part of A x;
they are summed likewise. So the whole factor gets its complete gradient on every rank; but where a rank sees its own
tokens only, Megatron sums it, by its mark `sequence_parallel`. The cut factor is marked as cut, or the gradient norm
would count it on one rank only.

A layer in which Megatron joins several (queries, keys and values; gate and up) has a pair for each, as in Transformers:
their A are stacked, their B are cut and ordered like the joint weight, and a mask tells which A a row of B belongs to.

Experts exchange nothing: each token comes to all ranks that have a part of its expert, and their results are summed
after the layer. Only the gradient of the whole factor is summed. A router is whole on every rank.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LowRankChange:
    """Forward hook that adds LoRA to a linear layer, whose parameters `lora_A` and `lora_B` hold the factors.

    They are parameters of this very layer because Megatron, when it gathers parameters while it computes, waits for
    them in hooks of the module that owns them; elsewhere they would silently be those of the step before.
    """

    scaling: float
    dropout: float
    is_column: bool
    cuts_tokens: bool
    num_joined: int
    """Number of Transformers layers that Megatron joins in one fused layer."""
    mask: Tensor | None
    """Mask of B [rows, joined × rank] of a fused layer such as QKV, so that each part uses its own A; else None."""

    def put_on(self, layer: nn.Module, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Add LoRA's A [joined × rank, columns] and B [rows, rank], all 0, and this hook to a frozen linear layer."""
        rows, columns = layer.weight.shape
        factor_a = nn.Parameter(layer.weight.new_zeros(self.num_joined * rank, columns))
        factor_b = nn.Parameter(layer.weight.new_zeros(rows, rank))
        cut, whole = (factor_b, factor_a) if self.is_column else (factor_a, factor_b)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=0 if self.is_column else 1, stride=1)
        # Megatron's mark: each rank has the gradient of its own tokens, so it is summed over tensor-parallel ranks.
        whole.sequence_parallel = self.cuts_tokens
        layer.register_parameter("lora_A", factor_a)
        layer.register_parameter("lora_B", factor_b)
        layer.register_forward_hook(self)
        return factor_a, factor_b

    def __call__(self, layer: Any, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor | None]) -> Any:
        """Add LoRA's output to the layer's output [tokens, 1, rows]; a bias that the caller adds is passed through."""
        output, bias = outputs
        narrow = self._exchanged(self._narrow(layer, inputs[0]))  # [tokens, 1, joined × rank]
        # [rows, rank] → [rows, joined × rank]: B beside itself, of which each row keeps the block of its own A.
        factor_b = layer.lora_B if self.mask is None else layer.lora_B.repeat(1, self.num_joined) * self.mask
        return output + self.scaling * functional.linear(narrow, factor_b), bias

    def _narrow(self, layer: Any, states: Tensor) -> Tensor:
        """Return LoRA's A x, [tokens, 1, joined × rank]; a partial sum where tensor parallelism cuts A's columns."""
        if not (self.dropout and layer.training):
            return functional.linear(states, layer.lora_A)  # without dropout one product for all joined layers
        # Inputs that all ranks have must be dropped equally on all of them, or their copies of A would diverge.
        is_shared = self.is_column and not self.cuts_tokens
        with nullcontext() if is_shared else get_cuda_rng_tracker().fork():
            # A mask of its own for each joined layer, as each has a dropout of its own in PEFT.
            each = [
                functional.linear(functional.dropout(states, self.dropout), factor)
                for factor in layer.lora_A.chunk(self.num_joined)
            ]
        return torch.cat(each, dim=-1)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        if self.is_column and self.cuts_tokens:
            # Backward reduce-scatters: each rank's rows of B give a part of the gradient of all tokens.
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True)
        if self.is_column:
            return copy_to_tensor_model_parallel_region(narrow)
        if self.cuts_tokens:
            return reduce_scatter_to_sequence_parallel_region(narrow)
        return reduce_from_tensor_model_parallel_region(narrow)


@dataclass(frozen=True)
class ExpertChange:
    """Forward hook of experts' linear layer that adds the output of each expert's own LoRA factors.

    Transformer Engine's layer of several experts gets one's tokens after the other's, and each one's number.
    """

    scaling: float
    is_column: bool

    def put_on(self, layer: nn.Module, weight: str, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Add LoRA's A [rank, columns] and B [rows, rank], all 0, for the expert with the frozen parameter `weight`."""
        frozen, number = getattr(layer, weight), weight.removeprefix("weight")
        rows, columns = frozen.shape
        factor_a, factor_b = (nn.Parameter(frozen.new_zeros(size)) for size in ((rank, columns), (rows, rank)))
        is_first = parallel_state.get_expert_tensor_parallel_rank() == 0
        for factor, is_cut in ((factor_a, not self.is_column), (factor_b, self.is_column)):
            # Of a factor that several ranks have, one counts in the gradient norm: it is marked as if it were cut.
            set_tensor_model_parallel_attributes(factor, is_parallel=is_cut or is_first, dim=int(not is_cut), stride=1)
            factor.allreduce = False  # Megatron's mark of experts
        layer.register_parameter(f"lora_A{number}", factor_a)
        layer.register_parameter(f"lora_B{number}", factor_b)
        if number in ("", "0"):  # one hook serves all experts of a layer
            layer.register_forward_hook(self)
        return factor_a, factor_b

    def __call__(self, layer: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
        """Add each expert's LoRA output to the layer's [tokens, rows]; the caller adds the passed bias."""
        output, bias = outputs
        # counts: number of tokens of each expert, of Transformer Engine's grouped layer
        states, counts = inputs if len(inputs) > 1 else (inputs[0], None)
        numbers = [""] if counts is None else [str(number) for number in range(len(counts))]
        changes = [
            self._change(one, getattr(layer, f"lora_A{number}"), getattr(layer, f"lora_B{number}"))
            for number, one in zip(numbers, [states] if counts is None else states.split(counts), strict=True)
        ]
        return output + self.scaling * torch.cat(changes), bias

    def _change(self, states: Tensor, factor_a: Tensor, factor_b: Tensor) -> Tensor:
        group = parallel_state.get_expert_tensor_parallel_group()
        if self.is_column:
            # Identity forward; backward sums the gradient of the factor that every rank has.
            factor_a = copy_to_tensor_model_parallel_region(factor_a, group)
        else:
            factor_b = copy_to_tensor_model_parallel_region(factor_b, group)
        return functional.linear(functional.linear(states, factor_a), factor_b)


def adapt_router(router: Any, rank: int, scaling: float) -> tuple[nn.Parameter, nn.Parameter]:
    """Add LoRA's A [rank, columns] and B [experts, rank], all 0, to a frozen router, so that they change its logits."""
    num_experts, columns = router.weight.shape
    factors = [nn.Parameter(router.weight.new_zeros(size)) for size in ((rank, columns), (num_experts, rank))]
    for name, factor in zip(("lora_A", "lora_B"), factors, strict=True):
        factor.sequence_parallel = router.config.sequence_parallel
        router.register_parameter(name, factor)
    of_base = router.gating

    def gating(states: Tensor) -> Tensor:
        logits: Tensor = of_base(states)
        change = functional.linear(functional.linear(states, router.lora_A), router.lora_B)
        return logits + scaling * change.to(logits.dtype)  # the router may compute its logits in another dtype

    router.gating = gating
    return factors[0], factors[1]
