"""What a reward is: a judge of a completion, which gives a number. A module a reward, a line in `registry.py`.

A reward's config is what a recipe says of it, and the judge itself; it is light, as all configs are.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from stages.core.strict import StrictModel
from stages.data.messages import Document


@dataclass(frozen=True)
class Completion:
    """What a model answered. prompt: as the model was asked, special tokens included; document: the same before the
    model's chat template rendered it. reference: the right answer, where the dataset has one. row: of the dataset.
    """

    prompt: str
    text: str
    num_tokens: int
    reference: str | None
    row: Mapping[str, Any]
    document: Document


Scores = Callable[[Sequence[Completion]], Iterator[float]]
"""A number for each completion, in their order. Raises DataError at the one that cannot be judged."""

RowCheck = Callable[[str | None, Mapping[str, Any]], str | None]
"""From a row's right answer and the row to why no completion of its prompt could be judged; None where it could."""


@dataclass(frozen=True)
class RewardContext:
    """What rewards have of the stage that they work in.

    inputs: stage name → folder of its artifact. kept: folder, made when needed, whose files belong to the artifact and
    outlive a kill. warn: tells people.
    """

    inputs: Mapping[str, Path]
    kept: Path
    warn: Callable[[str], None]


class Reward(StrictModel, ABC):
    """Fields that all rewards have, and how they judge."""

    NEEDS_REFERENCE: ClassVar[bool] = False
    """Whether it can only judge where the dataset has the right answer."""

    type: str
    weight: float = Field(1.0, allow_inf_nan=False, description="How much it counts in the sum of all rewards.")

    @abstractmethod
    def opened(self, name: str, context: RewardContext) -> contextlib.AbstractContextManager[Scores]:
        """What judges many completions, with whatever it needs for that; `name` is what the recipe calls it.

        Raises a LifecycleError for what is missing, such as a server that does not answer.
        """

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest number that it gives."""
        return -math.inf, math.inf

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        """Return why it could judge no completion of a row's prompt, such as `has no tests`; None where it could."""
        return None

    @contextlib.contextmanager
    def row_checks(self) -> Iterator[RowCheck]:
        """Yield `row_problem` for many rows, with whatever it needs for that."""
        yield self.row_problem

    def custom_code(self) -> str | None:
        """Code of the recipe's that it runs, such as `rewards.py:score`."""
        return None

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.weight == 0:
            raise ValueError("`weight` is 0, so it would count for nothing; expected another number, or remove it")
        return self


class CompletionReward(Reward):
    """One that judges each completion by itself, and needs nothing of the stage for it."""

    @abstractmethod
    def score(self, completion: Completion) -> float:
        """The number. Raises DataError for what cannot be judged."""

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        yield lambda completions: map(self.score, completions)


def scored_in_time(score: Callable[[Completion], float], name: str, context: RewardContext, limit_s: float) -> Scores:
    """Return what scores many completions: 0 and a warning for those at which `score` raises TimeoutError."""

    def scores(completions: Sequence[Completion]) -> Iterator[float]:
        num_late = 0
        for completion in completions:
            try:
                yield score(completion)
            except TimeoutError:
                num_late += 1
                yield 0.0
        if num_late:
            context.warn(
                f"the reward {name}: {num_late} of {len(completions)} comparisons took over {limit_s:g} s, or all "
                "memory that they may have; they count as wrong"
            )

    return scores
