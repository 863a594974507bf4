"""Optimizers of the FSDP engine, AdamW and Muon, and groups of parameters by weight decay and learning rate.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves matrices by orthogonalised momentum. A
sharded matrix is gathered, one at a time, and orthogonalised whole by every process, each of which keeps its shard;
`torch.optim.Muon` on shards would round differently with every number of processes.

AdamW (Loshchilov and Hutter 2019) is also there with moments, and perhaps weights, in bf16 with stochastic rounding: a
number between two bf16 values becomes the upper one with a probability in proportion to its nearness (Gupta et al.
2015), so that small updates are right on average: 0.999 times a second moment, rounded to nearest, would stay that
moment. The random bits are a function of the seed, the step, the parameter's name and the place in the parameter: the
same after a resumption and for any number of processes. GPUs compute them, and the step, by generated kernels: one by
one, the 37 operations took more than half of a training step on an H100.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.trainer_pt_utils import get_parameter_names

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.engines.fsdp.rectangles import own_indices
from stages.engines.settings import EngineSettings, LowPrecisionSettings, MuonSettings
from stages.models.loaded_weights import modules_kept_in_fp32
from stages.parallel.accelerator import fused

HOST_BUCKET, DEVICE_BUCKET = 2**20, 2**25
"""Number of elements that the optimizer updates at a time, on the host and on an accelerator, of 44 temporary bytes.

The host's 44 MiB fit a CPU's cache; the accelerator's 1.4 GiB keep each kernel longer than its launch."""
KEPT = ("weight", "exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X Xᵀ X and (X Xᵀ)² X in Muon's iteration, which brings singular values near 1 in few steps."""
LEAST_NORM = 1e-7
NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Name patterns of parameters without weight decay, as in `Trainer.get_decay_parameter_names`; a test compares both."""


class LowPrecisionAdamW(torch.optim.AdamW):
    """AdamW that computes in fp32 but may store moments, and also weights, in bf16 with stochastic rounding."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        settings: LowPrecisionSettings,
        seed: int,
        **adamw: Any,
    ) -> None:
        """Create AdamW with moments in the dtypes of `settings`. names: of the parameters, which decide random bits."""
        super().__init__(groups, **adamw)
        self._names = names
        self._dtypes = {
            "exp_avg": DTYPES[settings.exp_avg_dtype],
            "exp_avg_sq": DTYPES[settings.exp_avg_sq_dtype],
        }
        self._seed = seed
        self._places = {parameter: Places(parameter) for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient, those of equal dtype, device and step count together."""
        for group in self.param_groups:
            together: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kind = self._count_step(parameter), parameter.dtype, parameter.device
                    together.setdefault(kind, []).append(parameter)
            for (step, _, device), parameters in together.items():
                pieces = [self._whole(parameter) for parameter in parameters]
                for bucket in _buckets(pieces, HOST_BUCKET if device.type == "cpu" else DEVICE_BUCKET):
                    self._update(bucket, step, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load AdamW's state and keep its moments in their dtypes; torch would cast them to the weight's dtype."""
        super().load_state_dict(state_dict)
        loaded = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(loaded, own, strict=True):
            for moment in self._dtypes.keys() & state_dict["state"].get(key, {}).keys():
                self.state[parameter][moment] = state_dict["state"][key][moment]

    def _count_step(self, parameter: nn.Parameter) -> int:
        """Increase a parameter's step count and return the count. The first step creates the parameter's moments."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self._dtypes.items()})
        state["step"] += 1
        return int(state["step"])

    def _whole(self, parameter: nn.Parameter) -> _ShardSlice:
        state = self.state[parameter]
        kept = {"weight": parameter, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        # `view`, not `reshape`: the results are written back through these views.
        flat = {name: local_of(one).view(-1) for name, one in kept.items()}
        assert parameter.grad is not None
        gradient = local_of(parameter.grad).reshape(-1)
        return _ShardSlice(self._names[parameter], self._places[parameter], 0, gradient, flat)

    def _update(self, pieces: list[_ShardSlice], step: int, group: dict[str, Any]) -> None:
        """Update consecutive elements of several parameters of one dtype in fp32, all by the same kernels."""
        sizes = [len(piece.gradient) for piece in pieces]
        device = pieces[0].gradient.device
        rounded = [name for name in KEPT if pieces[0].kept[name].dtype == torch.bfloat16]
        # Rounded rows come first, so that they are one slice of `values`.
        rows = [*rounded, *(name for name in KEPT if name not in rounded)]
        # Before the values, so that intermediate results of both are never there at a time.
        bits = self._bits(pieces, sizes, rounded, step) if rounded else None
        # [weight and moments, elements of all pieces]: one kernel then works on many small parameters
        values = torch.empty(len(rows), sum(sizes), dtype=torch.float32, device=device)
        gradient = torch.empty_like(values[0])
        torch._foreach_copy_(gradient.split(sizes), [piece.gradient for piece in pieces])
        for name, row in zip(rows, values, strict=True):
            torch._foreach_copy_(row.split(sizes), [piece.kept[name] for piece in pieces])
        (beta1, beta2), rate = group["betas"], group["lr"]
        # Bias corrections and rates change with every step: as tensors, they need no new kernels.
        numbers = (1 - beta2**step, rate / (1 - beta1**step), 1 - rate * group["weight_decay"])
        scalars = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        move = fused(_move, device)
        move(gradient, dict(zip(rows, values, strict=True)), scalars, betas=(beta1, beta2), epsilon=group["eps"])
        if bits is not None:
            fused(round_at_random_, device)(values[: len(rounded)], bits)
        for name, row in zip(rows, values, strict=True):
            torch._foreach_copy_([piece.kept[name] for piece in pieces], row.split(sizes))

    def _bits(self, pieces: list[_ShardSlice], sizes: list[int], rounded: list[str], step: int) -> Tensor:
        """Return random bits for rounding weights and Adam's moments to bf16, int32 [rounded tensors, elements]."""
        device, starts = pieces[0].gradient.device, accumulate(sizes, initial=0)
        places = torch.arange(sum(sizes), device=device)
        # Place of an element in its whole parameter: the same bits, however parameters are sharded or put into buckets.
        shifts = [piece.places.first + piece.first - start for piece, start in zip(pieces, starts, strict=False)]
        torch._foreach_add_(places.split(sizes), shifts)
        for piece, own in zip(pieces, places.split(sizes), strict=True):
            if piece.places.are_apart:
                own.copy_(piece.places.in_whole(own))
        keys = torch.zeros(len(rounded), sum(sizes), dtype=torch.int32, device=device)
        numbers = [_key(self._seed, step, piece.name, name) for name in rounded for piece in pieces]
        torch._foreach_add_([one for row in keys for one in row.split(sizes)], numbers)
        return fused(random_bits, device)(places, keys)


@dataclass(frozen=True)
class _ShardSlice:
    """Consecutive elements of a parameter's shard, as flat views. first: place of the first in the shard."""

    name: str
    places: Places
    first: int
    gradient: Tensor
    kept: dict[str, Tensor]


def _buckets(pieces: Iterable[_ShardSlice], size: int) -> Iterator[list[_ShardSlice]]:
    """Group parameters' elements into buckets of `size` elements (last: fewer), each updated by the same kernels."""
    bucket: list[_ShardSlice] = []
    free = size
    for whole in pieces:
        start, end = 0, len(whole.gradient)
        while start < end:
            taken = slice(start, min(end, start + free))
            kept = {name: one[taken] for name, one in whole.kept.items()}
            bucket.append(_ShardSlice(whole.name, whole.places, start, whole.gradient[taken], kept))
            free -= taken.stop - start
            start = taken.stop
            if not free:
                yield bucket
                bucket, free = [], size
    if bucket:
        yield bucket


def _move(
    gradient: Tensor,
    kept: Mapping[str, Tensor],
    scalars: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """Make a step of AdamW in place, on fp32 tensors [elements]; the gradient is overwritten.

    scalars: the second moment's bias correction, the learning rate over the first's, and the factor of weight decay.
    """
    weight, exp_avg, exp_avg_sq = (kept[name] for name in KEPT)
    correction, rate, decay = scalars
    exp_avg.lerp_(gradient, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    # √(second moment ÷ bias correction) + ε, into the gradient's memory, which is free from here on
    denominator = torch.div(exp_avg_sq, correction, out=gradient).sqrt_().add_(epsilon)
    change = torch.div(exp_avg, denominator, out=denominator).mul_(rate)
    weight.mul_(decay).sub_(change)  # decoupled decay, before the step


def round_at_random_(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 in place to bf16 values, by adding 16 random bits and clearing the lower 16; bf16 values stay."""
    # bf16 is the upper half of fp32: bits 0 … 65535 carry into it with probability lower half ÷ 65536.
    # -65536 is 0xFFFF0000 as int32.
    values.view(torch.int32).add_(bits).bitwise_and_(-65536)
    return values


def random_bits(places: Tensor, key: Tensor | int) -> Tensor:
    """Return 16 random bits for each element, as int32, for stochastic rounding; both arguments are broadcast.

    They are a hash, Wellons's `lowbias32`, of places (int64) and a 32-bit key (int32, or one for all). It is unsigned;
    products and additions wrap around as in int32, and the masks make right shifts those of unsigned numbers.
    """
    mixed = (places ^ (places >> 32)).int() ^ key  # both halves of a 64-bit place count
    mixed ^= (mixed >> 16).bitwise_and_(0xFFFF)
    mixed *= 0x7FEB352D
    mixed ^= (mixed >> 15).bitwise_and_(0x1FFFF)
    mixed *= 0x846CA68B - 2**32  # 0x846CA68B as a signed 32-bit number
    mixed >>= 16
    return mixed.bitwise_and_(0xFFFF)


class Places:
    """Places in a whole flattened parameter of the elements that this process has: of some rows, columns, or both."""

    def __init__(self, parameter: Tensor) -> None:
        """Note which indices along each dimension the process has: those of a fused matrix may come in turns."""
        self.first = 0
        self._indices, self._strides = list[Tensor](), parameter.stride()
        if not isinstance(parameter, DTensor) or not parameter.to_local().numel():
            return
        indices = [own_indices(parameter, dimension) for dimension in range(parameter.ndim)]
        rows, *others = (one.tolist() for one in indices)
        if rows == [*range(rows[0], rows[0] + len(rows))] and [*map(len, others)] == [*parameter.shape[1:]]:
            self.first = rows[0] * self._strides[0]  # as FSDP2 shards: the elements are consecutive
        else:
            self._indices = indices

    @property
    def are_apart(self) -> bool:
        """True if the elements are not consecutive in the parameter, where `first` means nothing."""
        return bool(self._indices)

    def in_whole(self, places: Tensor) -> Tensor:
        """Return places in the flattened shard, int64 [elements], as places in the flattened parameter."""
        found, left = torch.zeros_like(places), places
        for indices, stride in zip(reversed(self._indices), reversed(self._strides), strict=True):
            found += indices.to(places.device)[left % len(indices)] * stride
            left = left // len(indices)
        return found


def _key(*parts: object) -> int:
    """Return a signed 32-bit hash of the arguments, from which random bits for rounding are derived."""
    # Python's own `hash` differs from process to process.
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], signed=True)


def local_of(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole, which is collective, or the tensor if it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class MuonAndAdamW(torch.optim.AdamW):
    """Optimizer that updates groups marked `is_muon` (matrices or stacks of them) by Muon, and others by AdamW."""

    def __init__(self, groups: Iterable[dict[str, Any]], muon: MuonSettings, dtype: torch.dtype, **adamw: Any) -> None:
        """Create Muon for the groups marked `is_muon` and AdamW for the others. dtype: of Muon's iterations."""
        super().__init__(groups, **adamw)
        self._muon = muon
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update Muon's parameters and drop their gradients, so that the following AdamW step skips them."""
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
        # Nesterov: (1 - μ) gradient + μ momentum
        update = gradient.lerp(momentum, muon.momentum) if muon.nesterov else momentum
        rows, columns = parameter.shape[-2:]
        ratio = math.sqrt(max(1, rows / columns))  # Jordan et al.: tall matrices move further
        if muon.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))  # Liu et al. 2025, equation 4
        # Collective: every process of the mesh must reach the same parameters in the same order.
        change = orthogonalized(full_tensor(update).to(self._dtype), muon.ns_steps).to(parameter.dtype)
        if isinstance(update, DTensor):
            # `src_data_rank=None`: each process cuts its shard from its own result, without communication.
            change = distribute_tensor(change, update.device_mesh, update.placements, src_data_rank=None)
        parameter.mul_(1 - learning_rate * weight_decay).add_(change, alpha=-learning_rate * ratio)


def orthogonalized(matrices: Tensor, num_iterations: int) -> Tensor:
    """Return matrices […, rows, columns] with singular values brought near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # At most as many rows as columns: the Gram matrix X Xᵀ is then the smaller one.
    wide = matrices.mT if is_tall else matrices
    # The Frobenius norm bounds the largest singular value: all are at most 1, where the iteration converges.
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(num_iterations):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if is_tall else wide


def matrices_of_layers(causal_lm: Any) -> set[str]:
    """Return the matrices that Muon updates, stacks of experts included: all but embeddings and output head."""
    # By identity: a head that is tied to the embedding is the same parameter.
    looked_up = {id(module.weight) for module in causal_lm.modules() if isinstance(module, nn.Embedding)}
    looked_up.add(id(causal_lm.get_output_embeddings().weight))
    return {
        name
        for name, one in causal_lm.named_parameters()
        if id(one) not in looked_up and (one.ndim == 2 or (one.ndim == 3 and ".experts." in name))
    }


def decayed_parameters(causal_lm: nn.Module) -> set[str]:
    """Return the names of parameters with weight decay: all but norms and biases."""
    return set(get_parameter_names(causal_lm, [nn.LayerNorm], NOT_DECAYED))


def parameter_groups(
    causal_lm: nn.Module,
    weight_decay: float,
    decayed: Collection[str] | None,
    adapter: AdapterConfig | None = None,
    matrices: Collection[str] = (),
    *,
    ratios: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return trainable parameters in groups of equal weight decay and learning rate, for torch's optimizers.

    decayed: names of those with weight decay; None: all. matrices: of those in groups with `is_muon`. ratios: factors
    on the learning rate by name. With LoRA+, B and all vectors learn faster, as in PEFT, by the `learning_rate_ratio`
    of their group.
    """
    ratio = (adapter and adapter.loraplus_lr_ratio) or 1.0
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in causal_lm.named_parameters():
        if parameter.requires_grad:
            decay = weight_decay if decayed is None or name in decayed else 0.0
            is_faster = ".lora_B." in name or parameter.ndim == 1
            kind = decay, (ratio if is_faster else 1.0) * ratios.get(name, 1.0), name in matrices
            groups.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "learning_rate_ratio": times, "is_muon": is_muon}
        for (decay, times, is_muon), parameters in groups.items()
    ]


def convert_to_bf16(causal_lm: nn.Module) -> None:
    """Convert all weights to bf16 before sharding, except those of modules that the architecture keeps in fp32.

    Raises ModelError where it keeps single weights amid others: FSDP2 trains weights of one dtype together.
    """
    modules, beside_others = modules_kept_in_fp32(causal_lm, torch.bfloat16)
    if beside_others:
        raise ModelError(
            f"`optimizer.bf16_stochastic_round` holds weights in bf16, but {type(causal_lm).__name__} keeps "
            f"{len(beside_others)} in fp32 that share a module with others, such as {min(beside_others)}; remove it"
        )
    kept = {id(one) for module in modules for one in module.parameters()}
    for parameter in causal_lm.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


def build_optimizer(
    causal_lm: Any, settings: EngineSettings, decayed: Collection[str] | None, ratios: Mapping[str, float]
) -> torch.optim.AdamW:
    """Build AdamW for all trainable parameters, or Muon for the layers' matrices and AdamW for the rest.

    decayed, ratios: as in `parameter_groups`, computed before FSDP2 gives the modules other classes.
    """
    adam, muon = settings.adam, settings.muon
    options: dict[str, Any] = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.epsilon}
    matrices = matrices_of_layers(causal_lm) if muon else ()
    groups = parameter_groups(causal_lm, adam.weight_decay, decayed, settings.adapter, matrices, ratios=ratios)
    if settings.low_precision != LowPrecisionSettings():
        names = {parameter: name for name, parameter in causal_lm.named_parameters()}
        return LowPrecisionAdamW(groups, names, settings.low_precision, settings.seed, **options)
    if muon is None:
        return torch.optim.AdamW(groups, **options, fused=True)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    return MuonAndAdamW(groups, muon, dtype, **options, fused=True)
