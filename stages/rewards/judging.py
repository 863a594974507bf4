"""Completions → what each of a recipe's rewards says of them, and the weighted sum."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from stages.core.errors import DataError
from stages.rewards.reward import Completion, Reward


@dataclass(frozen=True)
class Judgement:
    """rewards: by the names that the recipe gives them. total: their weighted sum."""

    rewards: Mapping[str, float]
    total: float


def judged(rewards: Mapping[str, Reward], completions: Iterable[tuple[str, Completion]]) -> Iterator[Judgement]:
    """What the rewards say of each completion; the text before it is what errors call it.

    Raises DataError for one that cannot be judged, and for a number that is not finite.
    """
    with contextlib.ExitStack() as stack:
        scores = {name: stack.enter_context(reward.opened()) for name, reward in rewards.items()}
        for place, completion in completions:
            found: dict[str, float] = {}
            for name, score in scores.items():
                try:
                    found[name] = score(completion)
                except DataError as error:
                    raise DataError(f"{place}: the reward {name}: {error}") from error
                if not math.isfinite(found[name]):
                    raise DataError(f"{place}: the reward {name} is {found[name]}; expected a finite number")
            yield Judgement(found, sum(rewards[name].weight * value for name, value in found.items()))
