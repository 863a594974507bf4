"""AdamW in low precision equals torch's up to rounding, rounds without bias, and runs few kernels."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.engines.fsdp import optimizer as module
from stages.engines.fsdp.optimizer import DEVICE_BUCKET, LowPrecisionAdamW, random_bits, round_at_random_
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
    """Stochastic rounding to bf16 is unbiased: 1 + 2^-7 × 0.3 keeps its mean; bf16's own values stay."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for sign in (1, -1):
        value = sign * (1 + 2**-7 * 0.3)
        found = round_at_random_(torch.full((2**16,), value), bits)
        assert set(found.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert found.double().mean().item() == pytest.approx(value, abs=2**-7 * 2**-15)
    held = torch.randn(2**16).bfloat16().float()
    assert torch.equal(round_at_random_(held.clone(), bits), held)


def test_bits_are_even_and_depend_on_the_place_alone() -> None:
    bits = random_bits(torch.arange(2**18), key=12345)
    assert torch.equal(random_bits(torch.arange(1000, 2000), key=12345), bits[1000:2000])
    assert not torch.equal(random_bits(torch.arange(2**18), key=12346), bits)
    assert bits.min() >= 0 and bits.max() < 2**16
    counts = torch.bincount(bits // 256, minlength=256).double()
    assert ((counts - 1024) ** 2 / 1024).sum() < 400, "chi squared of 255 degrees of freedom"
    assert not torch.equal(random_bits(torch.arange(8) + 2**33, key=1), random_bits(torch.arange(8), key=1))


def test_second_moments_in_bf16_decay() -> None:
    """Second moments in bf16 decay thanks to stochastic rounding; to nearest, 0.999 × 1 would stay 1."""
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
    """Weights in bf16 follow steps (1e-4) far below its resolution (2^-8 and 2^-7 around 1) by stochastic rounding."""
    weight = nn.Parameter(torch.ones(NUM_WEIGHTS, dtype=torch.bfloat16))
    adamw = optimizer(weight, BF16, lr=1e-4)
    for _ in range(50):
        weight.grad = torch.full_like(weight, 0.01)
        adamw.step()
    assert weight.float().mean().item() == pytest.approx(1 - 50 * 1e-4, abs=3e-4)


def test_a_restored_optimizer_has_moments_in_their_own_dtypes() -> None:
    """A restored optimizer keeps its moments in their own dtypes, where torch would use the dtype of the weight."""
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


ALL_SETTINGS = [LowPrecisionSettings(*case) for case in itertools.product(("fp32", "bf16"), ("fp32", "bf16"), (0, 1))]
SHAPES = ((7,), (), (130, 33), (3, 5, 17), (64, 64), (10007,), (0, 4))
KEPT_IN_FP32, WITHOUT_GRADIENT_AT_TIMES = 3, 4
DECAYS = (0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BETAS, EPSILON, RATE, SEED = (0.9, 0.95), 1e-8, 1e-2, 3


def by_definition(kept: dict[str, Tensor], gradient: Tensor, name: str, step: int, decay: float) -> dict[str, Tensor]:
    """Return weight and moments after an AdamW step by its definition; random bits are of 64-bit numbers."""
    weight, mean, square = (one.float() for one in kept.values())
    mean = mean.lerp(gradient.float(), 1 - BETAS[0])
    square = square.mul(BETAS[1]).addcmul(gradient.float(), gradient.float(), value=1 - BETAS[1])
    denominator = (square / (1 - BETAS[1] ** step)).sqrt() + EPSILON
    weight = weight * (1 - RATE * decay) - (RATE / (1 - BETAS[0] ** step)) * (mean / denominator)
    moved = {}
    for (key, old), new in zip(kept.items(), (weight, mean, square), strict=True):
        if old.dtype == torch.bfloat16:
            mask, hashed = 0xFFFFFFFF, sha256(repr((SEED, step, name, key)).encode()).digest()
            mixed = torch.arange(new.numel()).view(new.shape) ^ int.from_bytes(hashed[:4])
            mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & mask
            mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & mask
            new = ((new.view(torch.int32) + (mixed >> 16).int()) & -65536).view(torch.float32)
        moved[key] = new.to(old.dtype)
    return moved


@pytest.mark.parametrize("bucket", [1000, 2**20])
@pytest.mark.parametrize("settings", ALL_SETTINGS, ids=str)
def test_parameters_side_by_side_get_the_bits_of_each_alone(
    settings: LowPrecisionSettings, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW on several parameters at once gives the same bits as AdamW on each parameter alone.

    Covers odd sizes, buckets that cut parameters, one weight kept in fp32, and one without a gradient in two steps.
    """
    monkeypatch.setattr(module, "HOST_BUCKET", bucket)
    generator = torch.Generator().manual_seed(1)
    moments = {"exp_avg": DTYPES[settings.exp_avg_dtype], "exp_avg_sq": DTYPES[settings.exp_avg_sq_dtype]}
    weights, expected = [], []
    for number, shape in enumerate(SHAPES):
        in_bf16 = settings.bf16_stochastic_round and number != KEPT_IN_FP32
        start = torch.randn(shape, generator=generator).to(torch.bfloat16 if in_bf16 else torch.float32)
        weights.append(nn.Parameter(start.clone()))
        expected.append({"weight": start} | {name: start.new_zeros(shape, dtype=one) for name, one in moments.items()})
    names = {weight: f"w{number}" for number, weight in enumerate(weights)}
    groups = [{"params": weights[:4], "weight_decay": 0.1}, {"params": weights[4:], "weight_decay": 0.0}]
    adamw = LowPrecisionAdamW(groups, names, settings, SEED, lr=RATE, betas=BETAS, eps=EPSILON)
    num_steps = [0] * len(weights)
    for step in range(6):
        for number, weight in enumerate(weights):
            weight.grad = None
            if number != WITHOUT_GRADIENT_AT_TIMES or step not in (1, 2):
                weight.grad = 10.0**-step * torch.randn(weight.shape, generator=generator).to(weight.dtype)
                num_steps[number] += 1
                of_step = names[weight], num_steps[number], DECAYS[number]
                expected[number] = by_definition(expected[number], weight.grad, *of_step)
        adamw.step()
    for weight, wanted in zip(weights, expected, strict=True):
        for name, found in {"weight": weight.detach(), **{one: adamw.state[weight][one] for one in moments}}.items():
            assert found.dtype == wanted[name].dtype
            assert torch.equal(found, wanted[name])


RANK, NUM_PROCESSES = 2, 3
"""Process rank and number of processes of all tests in this file, since DTensor caches the shards of one rank."""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_PROCESSES)
    try:
        yield init_device_mesh("cpu", (NUM_PROCESSES,))
    finally:
        dist.destroy_process_group()


def test_shards_get_the_bits_that_they_have_in_the_whole(mesh: DeviceMesh) -> None:
    """AdamW gives a shard the bits of the whole parameter, also the last process's: 3 rows, 1 element, none."""
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator).bfloat16() for shape in ((11, 5), (7,), (2, 3))]
    gradients = [[torch.randn(one.shape, generator=generator).bfloat16() for one in start] for _ in range(4)]

    def train(kept: Callable[[Tensor], Tensor]) -> list[nn.Parameter]:
        weights = [nn.Parameter(kept(one.clone())) for one in start]
        names = {weight: f"w{number}" for number, weight in enumerate(weights)}
        adamw = LowPrecisionAdamW([{"params": weights}], names, BF16, SEED, lr=RATE)
        for of_step in gradients:
            for weight, gradient in zip(weights, of_step, strict=True):
                weight.grad = kept(gradient)
            adamw.step()
        return weights

    def shard(tensor: Tensor) -> Tensor:
        rows = tensor.chunk(NUM_PROCESSES)
        own = rows[RANK] if len(rows) > RANK else tensor[:0]
        options: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(own.clone(), mesh, [Shard(0)], **options)

    for mine, whole in zip(train(shard), train(lambda tensor: tensor), strict=True):
        assert torch.equal(mine.to_local(), shard(whole.detach()).to_local())


class Launches(TorchDispatchMode):
    """PyTorch dispatch mode that counts operations on `meta` tensors, and the peak bytes that their results take."""

    VIEWS = ("view", "split", "slice", "detach", "select", "alias", "unbind", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.number = self.most_bytes = self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {one.untyped_storage()._cdata for one in _on_meta((args, kwargs))}
        new = [one.untyped_storage() for one in _on_meta(result) if one.untyped_storage()._cdata not in before]
        if (before or new) and not str(func).split(".")[1].startswith(self.VIEWS):
            self.number += 1
        for storage in new:
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        self.most_bytes = max(self.most_bytes, self._live_bytes)
        return result

    def _free(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes


def _on_meta(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_meta]


def test_kernels_and_memory_of_a_step_are_bounded() -> None:
    """An optimizer step takes under 3 kernels a parameter, and 44 bytes an element of a bucket (8B on 8 devices)."""
    hidden, ffn, of_keys, head, vocabulary = 4096, 12288, 1024, 128, 151936
    matrices = [hidden * hidden] * 2 + [of_keys * hidden] * 2 + [ffn * hidden] * 3
    layer = [*matrices, head, head, hidden, hidden]
    sizes = [size // 8 for size in [*layer * 36, hidden, vocabulary * hidden, vocabulary * hidden]]
    weights = [nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in sizes]
    names = {weight: f"w{number}" for number, weight in enumerate(weights)}
    adamw = LowPrecisionAdamW([{"params": weights}], names, BF16, SEED, lr=RATE)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    adamw.step()
    with Launches() as launches:
        adamw.step()
    assert launches.number < 3 * len(weights), f"{launches.number} for {len(weights)} parameters"
    assert launches.most_bytes <= 44 * DEVICE_BUCKET
