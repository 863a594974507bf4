"""Reward by equality: 1 where the completion is the reference answer, else 0."""

from typing import ClassVar, Literal

from pydantic import Field

from stages.rewards.reward import Completion, CompletionReward


class ExactMatchReward(CompletionReward):
    """Reward of 1 where the completion equals the reference answer, but for white space around them, else 0."""

    NEEDS_REFERENCE: ClassVar[bool] = True

    type: Literal["exact_match"]
    ignore_case: bool = Field(False, description="Ignore the difference between upper and lower case.")

    def score(self, completion: Completion) -> float:
        assert completion.reference is not None
        answer, reference = completion.text.strip(), completion.reference.strip()
        if self.ignore_case:
            answer, reference = answer.casefold(), reference.casefold()
        return float(answer == reference)
