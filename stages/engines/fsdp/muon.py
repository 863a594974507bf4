"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): matrices move by orthogonalised momentum.

A sharded matrix is gathered, one at a time, and orthogonalised whole by every process, each of which keeps its shard;
`torch.optim.Muon` on shards would round differently with every number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.engines.settings import MuonSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X Xᵀ X and (X Xᵀ)² X, which bring singular values near 1 in few iterations."""
LEAST_NORM = 1e-7


class MuonAndAdamW(torch.optim.AdamW):
    """Muon for groups with `is_muon`, AdamW for the others.

    Muon's groups hold matrices [rows, columns] or stacks of them [experts, rows, columns].
    """

    def __init__(self, groups: Iterable[dict[str, Any]], muon: MuonSettings, dtype: torch.dtype, **adamw: Any) -> None:
        """Build Muon and AdamW; dtype: of the iterations; adamw: arguments of `torch.optim.AdamW` for other groups."""
        super().__init__(groups, **adamw)
        self._muon = muon
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make Muon's step, then AdamW's, which skips parameters without a gradient."""
        for group in self.param_groups:
            for parameter in group["params"] if group["is_muon"] else []:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["weight_decay"])
                    parameter.grad = None
        super().step(closure)

    def _move(self, parameter: nn.Parameter, gradient: Tensor, learning_rate: float, weight_decay: float) -> None:
        muon, state = self._muon, self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            state["step"] = torch.zeros(())  # which AdamW asks of every state that it restores
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - muon.momentum)
        update = gradient.lerp(momentum, muon.momentum) if muon.nesterov else momentum
        rows, columns = parameter.shape[-2:]
        ratio = math.sqrt(max(1, rows / columns))
        if muon.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))  # Liu et al. 2025, equation 4
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        change = orthogonalized(whole.to(self._dtype), muon.ns_steps).to(parameter.dtype)
        if isinstance(update, DTensor):
            change = distribute_tensor(change, update.device_mesh, update.placements, src_data_rank=None)
        parameter.mul_(1 - learning_rate * weight_decay).add_(change, alpha=-learning_rate * ratio)


def orthogonalized(matrices: Tensor, num_iterations: int) -> Tensor:
    """Return […, rows, columns] with the same singular vectors and singular values near 1 (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(num_iterations):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if is_tall else wide


def matrices_of_layers(causal_lm: Any) -> set[str]:
    """Return the names of matrices and stacks of experts' matrices, without embeddings and the head."""
    looked_up = {id(module.weight) for module in causal_lm.modules() if isinstance(module, nn.Embedding)}
    looked_up.add(id(causal_lm.get_output_embeddings().weight))
    return {
        name
        for name, one in causal_lm.named_parameters()
        if id(one) not in looked_up and (one.ndim == 2 or (one.ndim == 3 and ".experts." in name))
    }
