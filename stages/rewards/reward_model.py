"""What a reward model says of a completion: a number, higher for the better one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Literal

from stages.core.fields import Reference
from stages.rewards.reward import Reward, RewardContext, Scores

FOLDER = "reward_model"


class RewardModelReward(Reward):
    """What a reward model of another stage says of the prompt and the completion, rendered by its own chat template."""

    type: Literal["reward_model"]
    model: Annotated[str, Reference(("reward_model",))]

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """The weights are read when the first completions are there, and stay. Raises ModelError for a model without
        one number an answer, or without a usable tokenizer.
        """
        folder = context.inputs[self.model] / FOLDER
        from stages.models.start_up import hide_unused_packages

        hide_unused_packages()  # before Transformers is imported
        from stages.rewards import scoring  # with torch and Transformers, which a recipe is read without

        if not folder.is_dir():  # still to be trained, where the inputs of stages are checked
            yield lambda completions: iter(scoring.Scorer(folder)(completions))
            return
        scoring.check_score_head(folder)
        yield scoring.Scorer(folder)
