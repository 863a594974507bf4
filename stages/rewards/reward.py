"""What a reward is: a judge of a completion, which gives a number. A module a reward, a line in `registry.py`.

A reward's config is what a recipe says of it, and the judge itself; it is light, as all configs are.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from stages.core.strict import StrictModel


@dataclass(frozen=True)
class Completion:
    """What a model answered. prompt: as the model was asked, special tokens included. row: of the dataset."""

    prompt: str
    text: str
    num_tokens: int
    reference: str | None
    """The right answer, where the dataset has one."""
    row: Mapping[str, Any]


Score = Callable[[Completion], float]


class Reward(StrictModel, ABC):
    """Fields that all rewards have, and how they judge."""

    NEEDS_REFERENCE: ClassVar[bool] = False
    """Whether it can only judge where the dataset has the right answer."""

    type: str
    weight: float = Field(1.0, allow_inf_nan=False, description="How much it counts in the sum of all rewards.")

    @abstractmethod
    def score(self, completion: Completion) -> float:
        """The number. Raises DataError for what cannot be judged."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[Score]:
        """What judges many completions, one after another, with whatever it needs for that."""
        yield self.score

    def custom_code(self) -> str | None:
        """Code of the recipe's that it runs, such as `rewards.py:score`."""
        return None

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.weight == 0:
            raise ValueError("`weight` is 0, so it would count for nothing; expected another number, or remove it")
        return self
