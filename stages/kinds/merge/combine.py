"""Combination of several adapters of one model to one, as PEFT's `add_weighted_adapter` does it, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from peft.utils import merge_utils
from torch import Tensor

from stages.adapters.adapter import Adapter
from stages.core.errors import ModelError
from stages.kinds.merge.config import MergeConfig


def combine(adapters: Mapping[str, Adapter], config: MergeConfig, layers: Sequence[str]) -> Adapter:
    """Combine adapters (stage → adapter) with the config's weights.

    dare_… draws the elements that it keeps in the order of `layers`. As in PEFT, each matrix is multiplied by √(weight
    × scaling), with the sign on A. Raises ModelError for adapters of several ranks, which linear sums of A and B do not
    have.
    """
    if odd := [name for name, adapter in adapters.items() if not adapter.is_sum]:
        raise ModelError(
            f"combining adapters: {odd[0]} has DoRA or whole modules, which no sum has, or adapters of experts, which "
            "are not combined here; merge it alone"
        )
    density = config.density or 1.0
    sums: dict[str, Callable[..., Tensor]] = {
        "linear": merge_utils.task_arithmetic,
        "ties": partial(merge_utils.ties, density=density),
        "dare_linear": partial(merge_utils.dare_linear, density=density),
        "dare_ties": partial(merge_utils.dare_ties, density=density),
    }
    factors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for layer in layers:
            on_layer = {name: adapter for name, adapter in adapters.items() if layer in adapter.factors}
            _check_ranks({name: len(adapter.factors[layer][0]) for name, adapter in on_layer.items()}, layer)
            counts = [config.weighted[name] * adapter.scaling_of(layer) for name, adapter in on_layer.items()]
            pairs = [tuple(factor.float() for factor in adapter.factors[layer]) for adapter in on_layer.values()]
            factors[layer] = _summed(pairs, counts, sums[config.combination])
    any_of_them = next(iter(adapters.values()))
    return Adapter(any_of_them.base, factors, scaling=1.0, is_transposed=any_of_them.is_transposed)


def _check_ranks(ranks: Mapping[str, int], layer: str) -> None:
    if len(set(ranks.values())) > 1:
        found = ", ".join(f"{name} has {rank}" for name, rank in ranks.items())
        raise ModelError(f"combining adapters: expected the same rank, but {found} on {layer}; train them with one")


def _summed(
    pairs: Sequence[tuple[Tensor, ...]], counts: Sequence[float], summed: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of one layer: A [rank, in] and B [out, rank]."""
    roots = torch.tensor([math.sqrt(abs(count)) for count in counts])
    signs = torch.tensor([math.copysign(1, count) for count in counts])
    a, b = zip(*pairs, strict=True)
    return summed(list(a), roots * signs), summed(list(b), roots)
