"""Reward by number: 1 where the last number in a completion equals the last one in the reference answer, else 0."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.core.errors import DataError
from stages.core.redaction import quoted
from stages.rewards.reward import Completion, CompletionReward

NUMBER = re.compile(
    r"""(?:(?<!\d)[-+−])?                                      # a sign, but not the minus of 12-34
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)
        (?:[eE][-+]?\d{1,3}\b)?""",
    re.VERBOSE,
)
"""Pattern of numbers in texts, such as 1,234.5, -7, .5 and 6e3; a period that ends a sentence is not part of one."""


class NumberReward(CompletionReward):
    """Reward of 1 where the completion's last number is within `tolerance` of the reference answer's, else 0."""

    NEEDS_REFERENCE: ClassVar[bool] = True

    type: Literal["number"]
    tolerance: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Largest difference of two numbers that counts as equal."
    )

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        if reference is None or _last_number(reference) is not None:
            return None
        return f"has the right answer {quoted(reference, 60)}, which has no number"

    def score(self, completion: Completion) -> float:
        assert completion.reference is not None
        expected = _last_number(completion.reference)
        if expected is None:
            raise DataError(f"the reference answer {quoted(completion.reference, 60)} has no number; expected one")
        found = _last_number(completion.text)
        return float(found is not None and abs(found - expected) <= Decimal(str(self.tolerance)))


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:  # more digits than there is a context for
        return None
