"""Penalty on long completions, which grows with their length."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stages.rewards.reward import Completion, CompletionReward


class LengthReward(CompletionReward):
    """0 for a short completion, -1 beyond `max_tokens`, linear in between (DAPO, Yu et al. 2025, equation 13)."""

    type: Literal["length"]
    max_tokens: PositiveInt = Field(description="Length in tokens beyond which the penalty is full.")
    soft_tokens: NonNegativeInt = Field(0, description="Tokens before `max_tokens` at which the penalty begins.")

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
