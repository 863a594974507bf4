"""Reward by a reward model that another stage trained: a number for each completion, higher for the better one."""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Literal

from stages.core.fields import Reference
from stages.rewards.reward import Reward, RewardContext, Scores

FOLDER = "reward_model"


class RewardModelReward(Reward):
    """Score of another stage's reward model for prompt and completion, rendered by that model's chat template."""

    type: Literal["reward_model"]
    model: Annotated[str, Reference(("reward_model",))]

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Yield the reward model's scoring function; weights are read with the first completions and stay in memory.

        Raises ModelError for a model without exactly one number per answer, or without a usable tokenizer.
        """
        folder = context.inputs[self.model] / FOLDER
        from stages.models.start_up import hide_unused_packages

        hide_unused_packages()  # before Transformers is imported
        from stages.rewards import scoring  # with torch and Transformers, which a recipe is read without

        if not folder.is_dir():  # not trained yet: inputs are checked before a refresh starts
            yield lambda completions: iter(scoring.Scorer(folder)(completions))
            return
        scoring.check_score_head(folder)
        yield scoring.Scorer(folder)
