"""Fused RMSNorm, rotary embedding and SwiGLU for the CPU, with hand-written backward passes that save memory traffic.

Autograd's would turn, negate, split and join whole tensors again, since Megatron merges queries, keys and values into
one tensor, and the two halves of a gated layer into another.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional


class SwiGLU(nn.Module):
    """SwiGLU, SiLU(first half) × second half of the last dimension (Shazeer 2020), as Megatron's MLP calls it."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """Compute SwiGLU of the gate and up projections: […, 2 × width] becomes […, width]."""
        return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        # The two halves are written where Megatron's joint layer wants them, without a `cat`.
        of_both = torch.empty_like(gate_and_up)
        of_gate, of_up = of_both.chunk(2, dim=-1)
        # d up = silu(gate) × gradient; `of_gate` is scratch space until the next line.
        torch.mul(torch.ops.aten.silu.out(gate, out=of_gate), gradient, out=of_up)
        # d gate = silu'(gate) × up × gradient, in place
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_both


class Rotation(torch.autograd.Function):
    """Rotary positions (Su et al. 2021) of […, head width], with Llama's halves; the gradient rotates back."""

    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(states, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(gradient, cosines, -sines), None, None


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the two halves (a, b) of every head to (a cos - b sin, b cos + a sin)."""
    rotated = states * cosines
    # Both halves of a head have the same angles, so that the first half of the sines is enough.
    (first, second), (sine, _) = states.chunk(2, dim=-1), sines.chunk(2, dim=-1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sine, value=-1)
    rotated_second.addcmul_(first, sine)
    return rotated


class RootMeanSquareNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, states ÷ √(mean of squares + ε) × weight (Zhang and Sennrich 2019)."""

    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # [..., 1]; no tensor of squares is written
        mean_square = torch.linalg.vecdot(states, states).unsqueeze(-1).div_(states.shape[-1])
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, weight, scale)
        return (states * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weight, scale = ctx.saved_tensors
        normed = states * scale
        of_weight = (gradient * normed).flatten(0, -2).sum(0)  # [width]: summed over tokens
        of_normed = gradient * weight
        # d states = scale × (of_normed - normed × mean(of_normed × normed))
        mean = torch.linalg.vecdot(of_normed, normed).unsqueeze(-1).div_(-states.shape[-1])
        return of_normed.addcmul_(normed, mean).mul_(scale), of_weight, None
