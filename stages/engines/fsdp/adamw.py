"""AdamW (Loshchilov and Hutter 2019) with moments, and perhaps weights, in bf16 with stochastic rounding.

A number between two bf16 values becomes the upper one with a probability in proportion to its nearness (Gupta et al.
2015), so that updates of less than half a bf16 step are not lost but right on average: 0.999 times a second moment,
rounded to nearest, would stay that moment. The random bits are a function of the seed, the step, the parameter's name
and the place in the parameter: a resumed run rounds as the uninterrupted one, and so does any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stages.engines.settings import LowPrecisionSettings

CHUNK = 2**20
"""Elements that the optimizer updates at a time, each with some 100 bytes of intermediate results."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LowPrecisionAdamW(torch.optim.AdamW):
    """AdamW that computes in fp32 and stores moments in the given dtypes and weights in their own."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        settings: LowPrecisionSettings,
        seed: int,
        **adamw: Any,
    ) -> None:
        """Build the AdamW optimizer; names: of all parameters; adamw: arguments of `torch.optim.AdamW`."""
        super().__init__(groups, **adamw)
        self._names = names
        self._dtypes = {
            "exp_avg": DTYPES[settings.exp_avg_dtype],
            "exp_avg_sq": DTYPES[settings.exp_avg_sq_dtype],
        }
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state, and keep the moments' dtypes, which torch casts to their weight's dtype."""
        super().load_state_dict(state_dict)
        loaded = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(loaded, own, strict=True):
            for moment in self._dtypes.keys() & state_dict["state"].get(key, {}).keys():
                self.state[parameter][moment] = state_dict["state"][key][moment]

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update({name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self._dtypes.items()})
        state["step"] += 1
        step = int(state["step"])
        kept = {"weight": parameter, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        first = first_element(parameter)
        keys = {name: _key(self._seed, step, self._names[parameter], name) for name in kept}
        flat = {name: _local(one).view(-1).split(CHUNK) for name, one in kept.items()}
        chunks = zip(_local(gradient).reshape(-1).split(CHUNK), *flat.values(), strict=True)
        for number, (of_gradient, *old) in enumerate(chunks):
            new = _moved(of_gradient.float(), *[one.float() for one in old], step=step, group=group)
            places = torch.arange(len(of_gradient), device=of_gradient.device) + (first + number * CHUNK)
            for target, value, key in zip(old, new, keys.values(), strict=True):
                if target.dtype == torch.bfloat16:
                    value = rounded_at_random(value, random_bits(places, key))
                target.copy_(value)


def _moved(
    gradient: Tensor, weight: Tensor, mean: Tensor, mean_square: Tensor, *, step: int, group: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and moments after a step of AdamW, all fp32 [elements]."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    mean = mean.lerp(gradient, 1 - beta1)
    mean_square = mean_square.mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
    denominator = (mean_square / (1 - beta2**step)).sqrt() + group["eps"]
    weight = weight * (1 - rate * group["weight_decay"]) - (rate / (1 - beta1**step)) * (mean / denominator)
    return weight, mean, mean_square


def rounded_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 stochastically to bf16: down, or up where adding 16 random bits carries.

    Values that bf16 can hold stay.
    """
    return ((values.view(torch.int32) + bits) & -65536).view(torch.float32)


def random_bits(places: Tensor, key: int) -> Tensor:
    """Return random int32 [elements], 16 bits each, for stochastic rounding.

    They are a hash of places (int64) and a 32-bit key (Wellons's `lowbias32`).
    """
    mask = 0xFFFFFFFF
    mixed = (places ^ (places >> 32) ^ key) & mask
    mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & mask
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & mask
    return (mixed >> 16).int()


def first_element(parameter: Tensor) -> int:
    """Return the index, in the flattened parameter, of the first row that this process's shard has."""
    if not isinstance(parameter, DTensor) or not parameter.numel():
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] * (parameter.numel() // len(parameter)) if parameter.ndim else 0


def _key(*parts: object) -> int:
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
