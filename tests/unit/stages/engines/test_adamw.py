"""AdamW in low precision: equal to torch's without rounding, and unbiased with stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stages.engines.fsdp.optimizer import LowPrecisionAdamW, random_bits, rounded_at_random
from stages.engines.settings import LowPrecisionSettings

BF16 = LowPrecisionSettings("bf16", "bf16", bf16_stochastic_round=True)
NUM_WEIGHTS = 4096


def optimizer(weight: nn.Parameter, settings: LowPrecisionSettings, **options: float) -> LowPrecisionAdamW:
    return LowPrecisionAdamW([{"params": [weight]}], {weight: "w"}, settings, seed=3, betas=(0.9, 0.999), **options)


def test_without_rounding_it_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 300, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
    steps = [optimizer(ours, LowPrecisionSettings(), **options)]
    steps += [torch.optim.AdamW([theirs], betas=(0.9, 0.999), **options)]
    for _ in range(5):
        ours.grad = torch.randn(7, 300, generator=generator)
        theirs.grad = ours.grad.clone()
        for one in steps:
            one.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_each_neighbour_comes_as_often_as_it_is_near() -> None:
    """Stochastic rounding is unbiased: over all random bits, 1 + 2^-7 × 0.3 keeps its mean; bf16 values stay."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for sign in (1, -1):
        value = sign * (1 + 2**-7 * 0.3)
        found = rounded_at_random(torch.full((2**16,), value), bits)
        assert set(found.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert found.double().mean().item() == pytest.approx(value, abs=2**-7 * 2**-15)
    held = torch.randn(2**16).bfloat16().float()
    assert torch.equal(rounded_at_random(held, bits), held)


def test_bits_are_even_and_depend_on_the_place_alone() -> None:
    bits = random_bits(torch.arange(2**18), key=12345)
    assert torch.equal(random_bits(torch.arange(1000, 2000), key=12345), bits[1000:2000])
    assert not torch.equal(random_bits(torch.arange(2**18), key=12346), bits)
    assert bits.min() >= 0 and bits.max() < 2**16
    counts = torch.bincount(bits // 256, minlength=256).double()
    assert ((counts - 1024) ** 2 / 1024).sum() < 400, "chi squared of 255 degrees of freedom"
    assert not torch.equal(random_bits(torch.arange(8) + 2**33, key=1), random_bits(torch.arange(8), key=1))


def test_second_moments_in_bf16_decay() -> None:
    """With rounding to nearest, bf16's 0.999 × 1 would stay 1 forever."""
    weight = nn.Parameter(torch.ones(NUM_WEIGHTS, dtype=torch.bfloat16))
    adamw = optimizer(weight, BF16, lr=0.0)
    weight.grad = torch.ones_like(weight)
    adamw.step()
    before = adamw.state[weight]["exp_avg_sq"].float().mean().item()
    weight.grad = torch.zeros_like(weight)
    for _ in range(200):
        adamw.step()
    moment = adamw.state[weight]["exp_avg_sq"]
    assert moment.dtype == torch.bfloat16
    assert moment.float().mean().item() == pytest.approx(before * 0.999**200, rel=5e-3)
    assert torch.equal(weight, torch.ones_like(weight)), "without a learning rate"


def test_weights_in_bf16_take_steps_far_smaller_than_what_they_can_hold() -> None:
    """The next bf16 numbers around 1 are 2^-8 below and 2^-7 above; each step is 1e-4."""
    weight = nn.Parameter(torch.ones(NUM_WEIGHTS, dtype=torch.bfloat16))
    adamw = optimizer(weight, BF16, lr=1e-4)
    for _ in range(50):
        weight.grad = torch.full_like(weight, 0.01)
        adamw.step()
    assert weight.float().mean().item() == pytest.approx(1 - 50 * 1e-4, abs=3e-4)


def test_a_restored_optimizer_has_moments_in_their_own_dtypes() -> None:
    """torch would restore optimizer moments in the dtype of their weight."""
    cases = {
        LowPrecisionSettings("bf16", "bf16"): (torch.float32, torch.bfloat16),
        LowPrecisionSettings(bf16_stochastic_round=True): (torch.bfloat16, torch.float32),
    }
    for settings, (of_weight, of_moments) in cases.items():
        weight = nn.Parameter(torch.ones(8, dtype=of_weight))
        first = optimizer(weight, settings, lr=0.1)
        weight.grad = torch.full_like(weight, 1 / 3)
        first.step()
        second = optimizer(weight, settings, lr=0.1)
        second.load_state_dict(first.state_dict())
        for name in ("exp_avg", "exp_avg_sq"):
            assert second.state[weight][name].dtype == of_moments
            assert torch.equal(second.state[weight][name], first.state[weight][name])
