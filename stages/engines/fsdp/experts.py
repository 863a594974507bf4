"""Expert parallelism: each process has some experts of a mixture layer, and tokens travel to those that they chose.

Every process routes its own tokens. It sends each, once for every expert that the token chose, to the process that has
the expert, which computes its experts' products for the tokens of all and sends the results back (Lepikhin et al.
2021, GShard). What an expert learns is then a sum over all these tokens, without a reduction between processes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import pad

from stages.core.errors import ModelError
from stages.engines.fsdp.expert_choices import is_stack, receives_choices
from stages.engines.fsdp.tensor_parallel import changed

DIMENSION = "ep"
OTHERS = "experts_shard"
"""Dimensions of a mesh: processes that have other experts, and those that share the matrices of the same ones."""


def stacked_experts(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the modules in which Transformers keeps a layer's routed experts, each weight as one stack of them.

    Raises ModelError for a model that has none, or whose experts cannot be spread.
    """
    named = {name: one for name, one in causal_lm.named_modules() if is_stack(one)}
    if not named:
        raise ModelError(
            f"{type(causal_lm).__name__} has no experts that Transformers keeps in stacks, and `ep` spreads these; set "
            "`ep: 1`, and split it over more processes by `dp_shard`"
        )
    for name, module in named.items():
        if name.endswith(".base_layer"):
            raise ModelError(
                f"the adapter is on experts ({name.removesuffix('.base_layer')}), which `ep` spreads without it; set "
                "`ep: 1`, or leave experts out by `adapter.exclude_modules` or `target_modules`"
            )
        if not receives_choices(module):
            raise ModelError(
                f"{type(module).__name__} computes all experts for each token, so that none of them can travel; set "
                "`ep: 1`, and split the model over more processes by `dp_shard`"
            )
    return list(named.values())


def exchange_tokens(causal_lm: nn.Module, group: dist.ProcessGroup) -> list[nn.Module]:
    """Let each layer's experts compute the tokens of all processes of a group, which have equally many experts each.

    Called before matrices are split over `tp`, so that sums over `tp` are those of a token's results. Returns the
    modules, whose weights `spread_experts` divides. Raises ModelError where the number of experts is not divisible.
    """
    modules = stacked_experts(causal_lm)
    for module in modules:
        experts: Any = module
        if experts.num_experts % group.size():
            raise ModelError(
                f"ep {group.size()} does not divide the {experts.num_experts} experts of {type(module).__name__}; set "
                f"`ep: {math.gcd(group.size(), experts.num_experts)}`"
            )
        experts.num_experts //= group.size()
        experts.exchanged = experts.forward = _Exchanged(experts, experts.forward, group)
    return modules


def spread_experts(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Leave each process of the mesh's `ep` its experts of each stack, in place: stacks become DTensors."""
    for module in modules:
        for name, stack in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(_own_experts(stack, mesh), requires_grad=stack.requires_grad)


def spread_in(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose tokens travel."""
    return [one for one in causal_lm.modules() if isinstance(vars(one).get("exchanged"), _Exchanged)]


def shard_of(num_others: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return the function by which FSDP2 shards stacks over the processes that have the same experts.

    It divides experts, where their number allows it, else another dimension that is divisible: none whose rows `tp`
    deals in turns, as it does with fused matrices, since they would come back in another order.
    """

    def placement(stack: nn.Parameter) -> Shard | None:
        placed = stack.placements if isinstance(stack, DTensor) else ()
        in_turns = {one.dim % stack.ndim for one in placed if isinstance(one, _StridedShard)}
        sizes = _local(stack).shape
        fit = (one for one, size in enumerate(sizes) if one not in in_turns and size % num_others == 0)
        return next(map(Shard, fit), None)

    return placement


def _local(stack: Tensor) -> Tensor:
    return stack.to_local() if isinstance(stack, DTensor) else stack


class _Exchanged:
    """Forward pass of a layer's experts: tokens travel to their experts, and results back."""

    def __init__(self, module: Any, compute: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
        self._module, self._compute, self._group = module, compute, group

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' results, [tokens, width].

        hidden: [tokens, width]. chosen: indices among all experts, int64 [tokens, k]. weights: of their
        results, [tokens, k].
        """
        # Pairs of a token and an expert in the order of experts, of which each process has consecutive ones.
        order = chosen.flatten().argsort(stable=True)
        sent, received, experts = exchanged_counts(chosen, self._module.num_experts, self._group)
        there = _Travel.apply(hidden[order // chosen.shape[1]], sent, received, self._group)
        their_weights = _Travel.apply(weights.flatten()[order], sent, received, self._group)
        # One more pair, of zeros: also a process that gets no token computes, and its backward pass sends gradients.
        pairs = pad(there, (0, 0, 0, 1)), pad(experts, (0, 1))[:, None], pad(their_weights, (0, 1))[:, None]
        with changed(self._module, _local):
            results = self._compute(*pairs)[:-1]
        back = _Travel.apply(results, received, sent, self._group)
        return back[order.argsort()].view(*chosen.shape, -1).sum(1)


def exchanged_counts(chosen: Tensor, num_own: int, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Return how many pairs of token and expert go to each process and come from it, and the experts of these, [pairs].

    num_own: experts of a process, which are counted from 0.
    """
    counts = chosen.flatten().bincount(minlength=group.size() * num_own)
    # [processes, experts of one]: pairs that others send here
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = (one.view(group.size(), num_own).sum(1).tolist() for one in (counts, arriving))
    experts = torch.arange(num_own, device=chosen.device).repeat(group.size())
    return sent, received, experts.repeat_interleave(arriving)


class _Travel(torch.autograd.Function):
    """Rows of this process for each, [sent to all, …], to those that all sent here; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _travelled(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _travelled(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _travelled(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _own_experts(stack: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this process's experts of a stack that it has whole, or the same columns of as others along `tp`."""
    ways, axis = mesh[DIMENSION], [Shard(0)]
    local: Tensor = stack.detach()
    if isinstance(stack, DTensor):
        names = (DIMENSION, *(stack.device_mesh.mesh_dim_names or ()))
        local, axis, whole = local.to_local(), [Shard(0), *stack.placements], mesh[names]
    else:
        whole = ways
    own = local.chunk(ways.size())[ways.get_local_rank()].clone()
    return DTensor.from_local(own, whole, axis, run_check=False)
