"""Reward by pattern: 1 where a regular expression matches within the completion, else 0."""

from typing import Literal

from pydantic import Field, field_validator

from stages.core.patterns import LIMIT_S, Patterns, pattern_problem
from stages.rewards.reward import AskingReward, Completion


class RegexReward(AskingReward):
    r"""Reward of 1 where the pattern is found in the completion, else 0; `\A` and `\Z` are its beginning and end."""

    type: Literal["regex"]
    pattern: str = Field(
        min_length=1, description="Regular expression in Python's syntax; `.` is any character but a line end."
    )

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str) -> str:
        if problem := pattern_problem(pattern):
            raise ValueError(problem)
        return pattern

    @property
    def limit_s(self) -> float:
        return LIMIT_S

    def program(self) -> Patterns:
        return Patterns(LIMIT_S)

    def asked(self, program: Patterns, completion: Completion) -> float:
        return float(program.first_matches([self.pattern], [completion.text], "search") == [0])
