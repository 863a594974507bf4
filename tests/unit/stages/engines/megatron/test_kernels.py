"""The fused kernels compute what Transformers computes, and their gradients are those of autograd."""

import torch
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from stages.engines.megatron.kernels import RootMeanSquareNorm, Rotation, SwiGLU

TOKENS, HEADS, WIDTH = 5, 3, 8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rotary cosines and sines [tokens, 1, width] in Llama's convention, with equal halves."""
    angle = torch.rand(TOKENS, 1, WIDTH // 2, dtype=torch.float64).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def test_rotation_is_that_of_transformers():
    states, (cosines, sines) = random(TOKENS, HEADS, WIDTH), angles()
    in_rows = (factor.transpose(0, 1) for factor in (cosines, sines))
    expected, _ = apply_rotary_pos_emb(*(states[None].transpose(1, 2),) * 2, *in_rows)
    torch.testing.assert_close(Rotation.apply(states, cosines, sines), expected[0].transpose(0, 1))


def test_gradient_of_rotation_is_the_numerical_one():
    assert torch.autograd.gradcheck(Rotation.apply, (random(TOKENS, HEADS, WIDTH), *angles()))


def test_swiglu_and_its_gradient_are_those_of_two_halves():
    both, gradient = random(TOKENS, 1, 2 * WIDTH), torch.randn(TOKENS, 1, WIDTH, dtype=torch.float64)
    gate, up = both.chunk(2, dim=-1)
    expected = functional.silu(gate) * up
    found = SwiGLU(None)(both)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, both, gradient)[0] for value in (found, expected)))
    assert torch.autograd.gradcheck(SwiGLU(None), both)


def test_norm_and_its_gradients_are_those_of_torch():
    states, weight, gradient = random(TOKENS, 1, WIDTH), random(WIDTH), torch.randn(TOKENS, 1, WIDTH).double()
    expected = functional.rms_norm(states, weight.shape, weight, 1e-6)
    found = RootMeanSquareNorm.apply(states, weight, 1e-6)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, (states, weight), gradient) for value in (found, expected)))
