"""What another model says of a completion: any server that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.numbers import Seconds
from stages.core.strict import StrictModel
from stages.rewards.reward import Reward, RewardContext, Scores

RATE = """Rate an answer to a question, from {least} (useless) to {largest} (could not be better).
{reference}
The question:
{prompt}

The answer:
{completion}

Say in a few sentences what is good and bad about it. Then end with one line, "Rating: " and the number."""
COMPARE = """Which of two answers to a question is better?

The question:
{prompt}

Answer A:
{first}

Answer B:
{second}

Say in a few sentences what is good and bad about them. Then end with one line: "Better: A", "Better: B", or "Better:
equal"."""
PLACE = re.compile(r"\{([a-z]+)\}")


Scale = tuple[float, float]
"""Least and largest number that a judge may give."""


class JudgeConfig(StrictModel, ABC):
    """A judge: which model of which server, what it is asked, and what it may cost."""

    url: str = Field(pattern=r"^https?://[^\s/@]+(/\S*)?$", description="Of the server, up to and with `/v1`.")
    served_model: str = Field(min_length=1, description="Which, as the server calls it.")
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's key; default: no key."
    )
    template: str | None = Field(
        None,
        min_length=1,
        description="What the judge is asked: a text with {prompt} and {completion}, or with {prompt}, {first} and "
        "{second}; also {reference}, {least}, {largest}. It ends with `Rating: NUMBER` or `Better: A`; default: ours.",
    )
    max_requests: PositiveInt = Field(10_000, description="More are refused, before the first is sent.")
    max_tokens: PositiveInt = Field(512, description="Of one answer of the judge.")
    timeout_s: Seconds = Field(120.0, description="Of one request.")

    @property
    @abstractmethod
    def scale(self) -> Scale | None:
        """Of ratings; None for a judge that compares two answers."""

    @property
    def asked(self) -> str:
        """The template."""
        return self.template or (RATE if self.scale else COMPARE)

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.scale and self.scale[0] >= self.scale[1]:
            least, largest = self.scale
            raise ValueError(f"`least` is {least:g}; expected less than `largest`, {largest:g}")
        needed = {"completion"} if self.scale else {"first", "second"}
        known = needed | {"prompt", "reference"} | ({"least", "largest"} if self.scale else set())
        found = set(PLACE.findall(self.asked))
        if found - known or needed - found:
            raise ValueError(
                f"`template` has {', '.join(sorted(found)) or 'nothing'} in braces; expected "
                f"{', '.join(sorted(needed))}, and perhaps {', '.join(sorted(known - needed))}"
            )
        return self


class RatingConfig(JudgeConfig):
    """A judge that gives each answer a number of a scale."""

    least: float = Field(1.0, allow_inf_nan=False, description="Of the scale.")
    largest: float = Field(10.0, allow_inf_nan=False, description="Of the scale.")
    max_unjudged_fraction: float = Field(
        0.02, ge=0, lt=1, description="Answers that the judge gives no number, of all: more are an error."
    )

    @property
    def scale(self) -> Scale:
        return self.least, self.largest


class PairsConfig(JudgeConfig):
    """A judge that says which of two answers is better, asked in both orders."""

    max_unjudged_fraction: float = Field(
        0.02, ge=0, lt=1, description="Pairs of which the judge does not say what is better, of all: more are an error."
    )

    @property
    def scale(self) -> None:
        return None


class JudgeReward(JudgeConfig, Reward):
    """What a model says of the completion: a number of the scale; or with `compare`, whether it is better than the
    reference answer (1, 0.5 where they are equal, 0 where it is worse; asked in both orders, the mean of the two).
    """

    type: Literal["judge"]
    compare: bool = Field(False, description="Compare with the reference answer, instead of rating.")
    least: float = Field(1.0, allow_inf_nan=False, description="Of the scale.")
    largest: float = Field(10.0, allow_inf_nan=False, description="Of the scale.")

    @property
    def scale(self) -> Scale | None:
        return None if self.compare else (self.least, self.largest)

    @property
    def bounds(self) -> Scale:
        return self.scale or (0.0, 1.0)

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        if reference is None and (self.compare or "reference" in PLACE.findall(self.template or "")):
            return "has no right answer"
        return None

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Raises ServerError for a server that refuses, or whose model answers a trial with prose; TransientError for
        one that does not answer; RecipeError for a variable that is not set.
        """
        judges = importlib.import_module("stages.rewards.asked_judge")
        with judges.AskedJudge.opened(self, context.kept / f"{name}.jsonl") as judge:
            judge.try_out()
            yield judge.scores
