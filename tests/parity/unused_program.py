"""Test program in which two FSDP processes use different experts; each weight must get the sum of both gradients.

    unused_program

Once as torch has it, and once as torch 2.11 and 2.12, which lack the method for it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from stages.engines.fsdp.parallelize import reduce_unused
from stages.parallel.processes import joined_processes

NAME = "set_reduce_scatter_unused_params"


class Mixture(nn.Module):
    """Tiny model with a shared linear layer and two experts, of which a forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, states: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.shared(states))


def made(rank: int) -> tuple[Mixture, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture()
    return model, (rank + 1) * torch.ones(3, 4)


def main() -> None:
    with joined_processes() as device:
        mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("dp_shard",))
        expected, _ = made(0)
        for rank in range(2):
            expected(made(rank)[1], rank).square().sum().backward()
        for is_old in (False, True):
            if is_old:
                delattr(FSDPModule, NAME)
            model, states = made(dist.get_rank())
            fully_shard(model.shared, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for module in (model, model.shared):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            reduce_unused(model)
            for _ in range(2):  # a second step finds what the first has left
                model.zero_grad()
                model(states, dist.get_rank()).square().sum().backward()
                for (name, found), one in zip(model.named_parameters(), expected.parameters(), strict=True):
                    assert found.grad is not None, name
                    assert torch.allclose(found.grad.full_tensor(), one.grad, rtol=1e-4), (name, is_old)
