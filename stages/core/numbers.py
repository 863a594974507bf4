"""Types of numbers in recipes: those that are computed with in fp32, where none may become 0 or infinite; durations."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field

SMALLEST = 2.0**-126
"""That fp32 holds with all its digits."""
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
"""Last in a type: what stands behind it enters no JSON schema."""
PositiveFp32 = Annotated[float, Field(gt=0, allow_inf_nan=False), HELD_IN_FP32]
NonNegativeFp32 = Annotated[float, Field(ge=0, allow_inf_nan=False), HELD_IN_FP32]

NatsPerToken = Annotated[float, Field(gt=0, le=12)]
"""How far predictions may be apart. Even guesses among 160,000 tokens are 12 from certainty: a gate that allows more
lets everything pass.
"""

Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]
"""Three years at most: system calls take no length of time."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
