"""What another model says of a completion: any server that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.numbers import Seconds
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


class JudgeReward(Reward):
    """What a model says of the completion: a number of the scale; or with `compare`, whether it is better than the
    reference answer (1, 0.5 where they are equal, 0 where it is worse; asked in both orders, the mean of the two).
    """

    type: Literal["judge"]
    url: str = Field(pattern=r"^https?://[^\s/@]+(/\S*)?$", description="Of the server, up to and with `/v1`.")
    served_model: str = Field(min_length=1, description="Which, as the server calls it.")
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's key; default: no key."
    )
    compare: bool = Field(False, description="Compare with the reference answer, instead of rating.")
    template: str | None = Field(
        None,
        min_length=1,
        description="What the judge is asked: a text with {prompt} and {completion}, or with {prompt}, {first} and "
        "{second}; also {reference}, {least}, {largest}. It ends with `Rating: NUMBER` or `Better: A`; default: ours.",
    )
    least: float = Field(1.0, allow_inf_nan=False, description="Of the scale.")
    largest: float = Field(10.0, allow_inf_nan=False, description="Of the scale.")
    max_requests: PositiveInt = Field(10_000, description="More are refused, before the first is sent.")
    max_tokens: PositiveInt = Field(512, description="Of one answer of the judge.")
    timeout_s: Seconds = Field(120.0, description="Of one request.")

    @property
    def bounds(self) -> tuple[float, float]:
        return (0.0, 1.0) if self.compare else (self.least, self.largest)

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        if reference is None and (self.compare or "reference" in PLACE.findall(self.template or "")):
            return "has no right answer"
        return None

    @property
    def asked(self) -> str:
        """The template."""
        return self.template or (COMPARE if self.compare else RATE)

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Raises ServerError for a server that refuses, or whose model answers a trial with prose; TransientError for
        one that does not answer; RecipeError for a variable that is not set.
        """
        judges = importlib.import_module("stages.rewards.asked_judge")
        with judges.AskedJudge.opened(self, name, context) as judge:
            judge.try_out()
            yield judge.scores

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.least >= self.largest:
            raise ValueError(f"`least` is {self.least:g}; expected less than `largest`, {self.largest:g}")
        needed = {"first", "second"} if self.compare else {"completion"}
        known = needed | {"prompt", "reference", "least", "largest"}
        found = set(PLACE.findall(self.asked))
        if found - known or needed - found:
            raise ValueError(
                f"`template` has {', '.join(sorted(found)) or 'nothing'} in braces; expected "
                f"{', '.join(sorted(needed))}, and perhaps {', '.join(sorted(known - needed))}"
            )
        return self
