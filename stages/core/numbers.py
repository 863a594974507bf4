"""Types of numbers in recipes: floats that fp32 can hold, so that none becomes 0 or infinite; durations."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field

SMALLEST = 2.0**-126
"""Smallest normal fp32 number."""
LARGEST = (2 - 2.0**-23) * 2.0**127


def _as_held(value: float) -> float:
    if value and math.isfinite(value) and not SMALLEST <= abs(value) <= LARGEST:
        size = "small" if abs(value) < SMALLEST else "large"
        raise ValueError(
            f"{value:g} is too {size} for fp32, in which it is computed; expected a size between {SMALLEST:.2g} and "
            f"{LARGEST:.2g}"
        )
    return value


HELD_IN_FP32 = AfterValidator(_as_held)
"""Check that fp32 can hold a number; put last in a type, since what follows it enters no JSON schema."""
PositiveFp32 = Annotated[float, Field(gt=0, allow_inf_nan=False), HELD_IN_FP32]
NonNegativeFp32 = Annotated[float, Field(ge=0, allow_inf_nan=False), HELD_IN_FP32]

NatsPerToken = Annotated[float, Field(gt=0, le=12)]
"""Bound on differences of predictions, in nats per token. Even guesses among 160,000 tokens are 12 from certainty: a
gate that allows more lets everything pass.
"""

Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]
"""Duration of three years at most, since system calls do not accept any number of seconds."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
