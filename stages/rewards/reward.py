"""Protocol of rewards: recipe configs that judge a model's answers by a number.

A new reward is a module and a line in `registry.py`. Its config is light; what it needs is opened when it judges.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from stages.core.fields import StrictModel
from stages.data.media_reference import MediaReference
from stages.data.messages import Document


@dataclass(frozen=True)
class Completion:
    """A model's answer with its prompt and dataset row, as rewards judge it.

    prompt: special tokens included. reference: the right answer, if any. document: the prompt before the chat template.
    address: returns the `data:` address of one of its pictures; None where they are not at hand.
    """

    prompt: str
    text: str
    num_tokens: int
    reference: str | None
    row: Mapping[str, Any]
    document: Document
    address: Callable[[MediaReference], str] | None = None


Scores = Callable[[Sequence[Completion]], Iterator[float]]
"""Function that yields each completion's reward, in order; DataError at one that cannot be judged."""

RowCheck = Callable[[str | None, Mapping[str, Any]], str | None]
"""Function of a row's right answer and the row: the reason why no answer to it could be judged, or None."""


@dataclass(frozen=True)
class RewardContext:
    """Resources that a stage provides to its rewards.

    inputs: stage name → artifact folder. kept: folder, made when needed, whose files belong to the artifact and outlive
    a kill. warn: reports a warning.
    """

    inputs: Mapping[str, Path]
    kept: Path
    warn: Callable[[str], None]


class Reward(StrictModel, ABC):
    """Base class of all rewards: common config fields, a check of dataset rows, and a method that starts scoring."""

    NEEDS_REFERENCE: ClassVar[bool] = False
    """True if the reward compares with a right answer, so that the dataset must have it."""

    type: str
    weight: float = Field(1.0, allow_inf_nan=False, description="Weight of this reward in the sum of all rewards.")

    @abstractmethod
    def opened(self, name: str, context: RewardContext) -> contextlib.AbstractContextManager[Scores]:
        """Open what the reward (`name` in the recipe) needs, and yield the function that scores completions.

        Raises a LifecycleError for something missing, such as a server that does not answer.
        """

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest number that the reward can give."""
        return -math.inf, math.inf

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        """Return the reason why no answer to a row could be judged, such as `has no tests`; None if it could."""
        return None

    @contextlib.contextmanager
    def row_checks(self) -> Iterator[RowCheck]:
        """Yield the function that checks rows (`row_problem`); its programs stay open for many."""
        yield self.row_problem

    def custom_code(self) -> str | None:
        """Return the name of the recipe's code that the reward runs, such as `rewards.py:score`; None without code."""
        return None

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.weight == 0:
            raise ValueError("`weight` is 0, so the reward would have no effect; expected another number, or remove it")
        return self


class CompletionReward(Reward):
    """Base class of rewards that judge each completion by itself, without the stage's inputs or folder."""

    @abstractmethod
    def score(self, completion: Completion) -> float:
        """Return the reward of one completion. Raises DataError for a completion that cannot be judged."""

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        yield lambda completions: map(self.score, completions)


class AskingReward(CompletionReward):
    """Base class of rewards that a separate program computes; a completion on which it times out counts as wrong."""

    @abstractmethod
    def program(self) -> contextlib.AbstractContextManager[Any]:
        """Return a client of the program that computes the reward; the program starts at the first question."""

    @abstractmethod
    def asked(self, program: Any, completion: Completion) -> float:
        """Ask the judging program for the reward of a completion. Raises TimeoutError."""

    @property
    @abstractmethod
    def limit_s(self) -> float:
        """Time limit of the judging program for one completion, in seconds."""

    def score(self, completion: Completion) -> float:
        with self.program() as program:
            try:
                return self.asked(program, completion)
            except TimeoutError:
                return 0.0

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        def scores(completions: Sequence[Completion]) -> Iterator[float]:
            num_late = 0
            for completion in completions:
                try:
                    yield self.asked(program, completion)
                except TimeoutError:
                    num_late += 1
                    yield 0.0
            if num_late:
                context.warn(
                    f"the reward {name}: {num_late} of {len(completions)} comparisons took over {self.limit_s:g} s, or "
                    "all memory that they may have; they count as wrong"
                )

        with self.program() as program:
            program.start()
            yield scores
