"""Load-balancing loss of Megatron's routers, for each packed row as in the FSDP engine (`stages.engines.balance`).

Megatron's own is computed over micro-batches, or over the batches so far, and so differs by layout.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from stages.engines.balance import row_balance
from stages.engines.megatron.attention import PackedTokens


class RouterBalance:
    """Load-balancing loss of this process's routers, added to their gradients and summed for the metric."""

    def __init__(
        self, chunks: Iterable[GPTModel], coefficient: float, num_mixture_layers: int, device: torch.device
    ) -> None:
        """Replace the balancing loss of these chunks' routers. num_mixture_layers: in the whole model."""
        self._coefficient = coefficient
        self._num_mixture_layers = num_mixture_layers
        self._weight = torch.zeros((), device=device)
        self._sum = torch.zeros((), device=device)
        for layer in (layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)):
            layer.register_forward_pre_hook(_give_rows, with_kwargs=True)
            layer.mlp.router._apply_aux_loss = _OfRouter(self, layer.mlp.router)

    def begin_step(self, num_tokens: Tensor) -> None:
        """Reset the balancing loss before a step. num_tokens: tokens of the global batch, without padding."""
        # The mean over tokens and mixture layers: row losses are weighted by tokens.
        self._weight = (1 / (num_tokens * self._num_mixture_layers)).float()
        self._sum.zero_()

    def attach(self, probabilities: Tensor, balance: Tensor) -> Tensor:
        """Return the same router probabilities, whose backward pass also adds the balancing loss's gradient."""
        part = self._weight * balance
        self._sum += part.detach()
        # Identity forward; backward gives the second argument the loss scale as gradient: 1 here.
        attached: Tensor = MoEAuxLossAutoScaler.apply(probabilities, self._coefficient * part)
        return attached

    def of_step(self) -> Tensor:
        """Return the load-balancing loss of a training step, before multiplication by its coefficient. Collective."""
        total = self._sum.clone()
        dist.all_reduce(total)  # every process has other tokens or other layers
        return total


class _OfRouter:
    """Callable that replaces the method by which a Megatron router adds its own load-balancing loss."""

    def __init__(self, balance: RouterBalance, router: Any) -> None:
        self._balance = balance
        self._router = router

    def __call__(
        self, probabilities: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attach the load-balancing loss, where gradients are wanted, to router scores [tokens, experts] of sum 1."""
        tokens: PackedTokens = self._router.packed_tokens
        assert tokens.rows is not None
        # With experts, tp implies sequence parallelism: each tensor-parallel rank has consecutive tokens.
        rows = tokens.rows.chunk(parallel_state.get_tensor_model_parallel_world_size())
        own = rows[parallel_state.get_tensor_model_parallel_rank()]
        balance = row_balance(scores, routing_map.bool(), own, tokens.num_rows, self._add_up)
        return self._balance.attach(probabilities, balance)

    def _add_up(self, counts: Tensor) -> Tensor:
        """Sum routing counts over the tensor-parallel and context-parallel processes that share a row's tokens."""
        dist.all_reduce(counts, group=self._router.tp_cp_group)
        return counts


def _give_rows(layer: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
    """Give a layer's router each token's packed row, before each forward pass, for the load-balancing loss.

    A router is called with states alone, and when a layer is recomputed, another micro-batch may be at work.
    """
    layer.mlp.router.packed_tokens = arguments["packed_seq_params"]
