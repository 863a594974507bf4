"""Punishes completions that are too long, the more so the longer they are."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stages.rewards.reward import Completion, CompletionReward


class LengthReward(CompletionReward):
    """0 for a short completion, -1 for one of over `max_tokens`, in between where it comes near (DAPO, Yu et al. 2025,
    equation 13).
    """

    type: Literal["length"]
    max_tokens: PositiveInt = Field(description="Longer ones have the full punishment.")
    soft_tokens: NonNegativeInt = Field(0, description="So many before that, the punishment begins.")

    @model_validator(mode="after")
    def _begins_somewhere(self) -> Self:
        if self.soft_tokens > self.max_tokens:
            raise ValueError(f"`soft_tokens` is {self.soft_tokens}; expected at most `max_tokens`, {self.max_tokens}")
        return self

    def score(self, completion: Completion) -> float:
        over = completion.num_tokens - (self.max_tokens - self.soft_tokens)
        if completion.num_tokens > self.max_tokens:
            return -1.0
        return -over / self.soft_tokens if over > 0 else 0.0
