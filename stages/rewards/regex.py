"""1 where a pattern is found in the completion, else 0."""

from __future__ import annotations

from typing import Literal

import regex
from pydantic import Field, field_validator

from stages.core.errors import DataError
from stages.rewards.reward import Completion, CompletionReward

TIMEOUT_S = 2.0
"""Of one search: some patterns take time that grows exponentially with the text."""


class RegexReward(CompletionReward):
    r"""1 where the pattern is found in the completion, else 0; `\A` and `\Z` are its beginning and end."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, description="As Python has them; `.` is any character but a line end.")

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return pattern

    def score(self, completion: Completion) -> float:
        try:
            return float(regex.search(self.pattern, completion.text, timeout=TIMEOUT_S) is not None)
        except TimeoutError as error:
            raise DataError(
                f"the search for {self.pattern!r} takes over {TIMEOUT_S:g} s in a text of {len(completion.text)} "
                "characters; write a pattern without repetitions of repetitions"
            ) from error
