"""Families whose training amplifies fp32's rounding: split over processes, they stay as near to fp64 as Transformers.

Plain Transformers' own fp32 leaves the bounds of `test_split_families` here: from a step to the next, its distance from
fp64 grows three- to eightfold, without a token that chose another expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stages.engines.fsdp.probe import _InDoublePrecision
from tests.parity.plain_adam import trainer_parameter_groups
from tests.parity.ranks import Ranks
from tests.parity.test_fsdp import WEIGHT_DECAY, learn_plainly, make_data
from tests.parity.test_split_families import LARGEST_OF_WEIGHTS, LAYOUTS, Data, made, train

AMPLIFYING = {
    "granitemoe": ("ep", "ep, dp", "cp", "cp, dp"),
    "jamba": ("ep", "ep, dp"),
    "kimi_linear": ("tp", "ep", "ep, dp"),
    "qwen3_5_moe_text": ("tp", "ep", "ep, dp", "ep, tp"),
    "qwen3_next": ("tp", "ep", "ep, dp", "ep, tp"),
}
"""Layouts by family: of scores without a scale, or states."""
LARGEST_RATIO = 2.0
"""Largest distance from fp64, in that of plain Transformers in fp32: one draw of rounding differs so from another."""


def test_split_experts_are_as_near_to_fp64_as_transformers(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    _check("granitemoe", ["ep"], fsdp_ranks, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("family", AMPLIFYING)
def test_every_split_is_as_near_to_fp64_as_transformers(family: str, fsdp_ranks: Ranks, tmp_path: Path) -> None:
    _check(family, AMPLIFYING[family], fsdp_ranks, tmp_path)


@dataclass(frozen=True)
class _Learned:
    """Results of five steps; gradients are the clipped ones of the first."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def distances(self, exact: "_Learned") -> dict[str, float]:
        """Return the largest differences from fp64: relative, of gradients by their norms, but of weights."""
        # Of weights whose gradient is next to none, the rounding of the others is all that is seen.
        least = 1e-3 * max(one.norm() for one in exact.gradients.values())
        return {
            "loss": _relative(self.losses, exact.losses),
            "grad_norm": _relative(self.grad_norms, exact.grad_norms),
            "weight": max(float((self.weights[name] - one).abs().max()) for name, one in exact.weights.items()),
            **{
                name: float((self.gradients[name] - one).norm() / max(one.norm(), least))
                for name, one in exact.gradients.items()
            },
        }


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def _check(family: str, layouts: Sequence[str], ranks: Ranks, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path / family)
    data = make_data(5)
    with _InDoublePrecision():  # also what Transformers casts to fp32: of Kimi Linear, all that its fp32 is off
        exact = _learned(tmp_path / family, data, torch.float64, "eager")
    # Two ways to compute the same experts: two draws of what fp32 rounds.
    draws = [_learned(tmp_path / family, data, torch.float32, one).distances(exact) for one in ("eager", "grouped_mm")]
    theirs = {name: max(one[name] for one in draws) for name in draws[0]}
    assert theirs["weight"] > LARGEST_OF_WEIGHTS, "without which the family keeps the bounds of others"
    for name in layouts:
        found = train(family, LAYOUTS[name], data, ranks, tmp_path)
        gradients = load_file(tmp_path / f"{family}.gradients.safetensors")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / family, dtype=torch.float32).state_dict()
        own = _Learned(found["losses"], found["grad_norms"], gradients, exported).distances(exact)
        farther = {key: (one, theirs[key]) for key, one in own.items() if one > LARGEST_RATIO * theirs[key]}
        assert not farther, name


def _learned(folder: Path, data: Data, dtype: torch.dtype, experts: str) -> _Learned:
    """Train a folder's model with plain Transformers, whose experts are computed in one of its ways."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.set_experts_implementation(experts)
    losses, grad_norms, trained = learn_plainly(model, trainer_parameter_groups(model, WEIGHT_DECAY), data)
    return _Learned(losses, grad_norms, trained.first_gradients, trained.state_dict())
