"""Reward by length: a penalty on long completions, which grows with their length."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stages.rewards.reward import Completion, CompletionReward


class LengthReward(CompletionReward):
    """Penalty of 0 for a short completion and -1 beyond `max_tokens`, linear in between.

    DAPO: Yu et al. 2025, equation 13.
    """

    type: Literal["length"]
    max_tokens: PositiveInt = Field(
        description="Length of a completion, in tokens, beyond which it gets the full penalty."
    )
    soft_tokens: NonNegativeInt = Field(
        0, description="Number of tokens before `max_tokens` at which the penalty begins to grow."
    )

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
