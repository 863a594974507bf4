"""Reward by pattern: 1 where a regular expression matches within the completion, else 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import Field, field_validator

from stages.core.patterns import LIMIT_S, Patterns, pattern_problem
from stages.rewards.reward import Completion, CompletionReward, RewardContext, Scores, scored_in_time


class RegexReward(CompletionReward):
    r"""1 where the pattern is found in the completion, else 0; `\A` and `\Z` are its beginning and end."""

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

    def score(self, completion: Completion) -> float:
        with Patterns(LIMIT_S) as patterns:
            try:
                return self._score(patterns, completion)
            except TimeoutError:
                return 0.0

    @contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        with Patterns(LIMIT_S) as patterns:
            patterns.start()
            yield scored_in_time(lambda completion: self._score(patterns, completion), name, context, LIMIT_S)

    def _score(self, patterns: Patterns, completion: Completion) -> float:
        """Return the score. Raises TimeoutError."""
        return float(patterns.first_matches([self.pattern], [completion.text], "search") == [0])
