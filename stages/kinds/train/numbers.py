"""Numbers that a training stage can be given: what would vanish in fp32, or overflow a generator, is refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from stages.core.numbers import HELD_IN_FP32
from stages.planner.workload import Precision

Rate = Annotated[float, Field(ge=1e-12, allow_inf_nan=False), HELD_IN_FP32]
"""Of learning, or of clipping: a weight of 0.01 in fp32 has no room for a smaller change."""
Denominator = Annotated[float, Field(ge=1e-30, allow_inf_nan=False), HELD_IN_FP32]
"""Added to what fp32 can hold."""
Epochs = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
"""Fewer are a mistake: `steps` says how few optimizer steps are meant."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
"""Published runs take some ten thousand rows at most."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What generators of random numbers take."""


def _has_range(value: Any) -> Any:
    if value in ("fp16", "float16"):
        raise ValueError(
            f"found {value}, in which small gradients become 0 unless the loss is scaled, and no engine here scales "
            "it; expected bf16, which has the range of fp32, or fp32"
        )
    return value


TrainingPrecision = Annotated[Precision, BeforeValidator(_has_range)]
"""What layers compute in."""


def contradiction(steps: int | None, warmup_steps: int, learning_rate: float, weight_decay: float) -> str | None:
    """What cannot be meant of numbers that are each allowed."""
    if steps is not None and warmup_steps > steps:
        return (
            f"`warmup_steps: {warmup_steps}` is more than `steps: {steps}`, so `learning_rate` would never be reached; "
            "lower it"
        )
    if weight_decay * learning_rate >= 1:
        return (
            f"`weight_decay: {weight_decay:g}` × `learning_rate: {learning_rate:g}` is what a step takes off each "
            "weight, as a share of it; expected less than 1"
        )
    return None
