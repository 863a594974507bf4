"""Several adapters of one model → one, as PEFT's `add_weighted_adapter` combines them, layer by layer."""

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
    """Stage → adapter, combined with the config's weights; what dare_… keeps is drawn in the order of `layers`.

    Each matrix counts √(weight × scaling) times, the sign on A: so PEFT has it. Raises ModelError for adapters of
    several ranks, which linear sums of A and B do not have.
    """
    if odd := [name for name, one in adapters.items() if not one.is_sum]:
        raise ModelError(
            f"combining adapters: {odd[0]} has DoRA or whole modules, which no sum has, or adapters of experts, which "
            "nothing here combines; merge it alone"
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
            having = {name: one for name, one in adapters.items() if layer in one.factors}
            _check_ranks({name: len(one.factors[layer][0]) for name, one in having.items()}, layer)
            counts = [config.weighted[name] * one.scaling_of(layer) for name, one in having.items()]
            pairs = [tuple(factor.float() for factor in one.factors[layer]) for one in having.values()]
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
    """A [rank, in] and B [out, rank] of one layer."""
    roots = torch.tensor([math.sqrt(abs(count)) for count in counts])
    signs = torch.tensor([math.copysign(1, count) for count in counts])
    a, b = zip(*pairs, strict=True)
    return summed(list(a), roots * signs), summed(list(b), roots)
