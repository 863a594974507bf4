"""Scoring of completions by all rewards of a recipe, and their weighted sum."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stages.core.errors import DataError, LifecycleError
from stages.rewards.reward import Completion, Reward, RewardContext, Scores

Named = tuple[str, Completion]
"""Pair of a completion's description for error messages, such as its dataset row, and the completion itself."""


@dataclass(frozen=True)
class Judgement:
    """Rewards of one completion, by the recipe's names. total: their weighted sum."""

    rewards: Mapping[str, float]
    total: float


class Judge(Protocol):
    """Function that scores completions (protocol). by: names of the recipe's rewards that judge these; None: all."""

    def __call__(self, completions: Sequence[Named], by: Collection[str] | None = None) -> list[Judgement]: ...


@contextlib.contextmanager
def judging(rewards: Mapping[str, Reward], context: RewardContext) -> Iterator[Judge]:
    """Open all rewards of a recipe, and yield the function that scores completions by them.

    Raises a LifecycleError that names a reward which cannot work; the function a DataError for a completion that cannot
    be judged, and a number that is not finite or out of bounds.
    """
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(_opened(name, reward, context)) for name, reward in rewards.items()}

        def judge(completions: Sequence[Named], by: Collection[str] | None = None) -> list[Judgement]:
            chosen = [name for name in opened if by is None or name in by]
            by_reward = [_scored(name, rewards[name], opened[name], completions) for name in chosen]
            by_completion = [dict(zip(chosen, values, strict=True)) for values in zip(*by_reward, strict=True)]
            return [
                Judgement(values, sum(rewards[name].weight * value for name, value in values.items()))
                # without rewards `zip` gives nothing, and each completion still needs a judgement
                for values in by_completion or ({} for _ in completions)
            ]

        yield judge


def opening_problems(rewards: Mapping[str, Reward], context: RewardContext) -> Iterator[tuple[str, LifecycleError]]:
    """Open each reward once; yield name and error of those that cannot work, such as with a missing file."""
    for name, reward in rewards.items():
        try:
            with reward.opened(name, context):
                pass
        except LifecycleError as error:
            yield name, error


@contextlib.contextmanager
def _opened(name: str, reward: Reward, context: RewardContext) -> Iterator[Scores]:
    with contextlib.ExitStack() as stack:
        try:
            scores = stack.enter_context(reward.opened(name, context))
        except DataError as error:
            raise DataError(f"the reward {name}: {error}") from error
        yield scores


def _scored(name: str, reward: Reward, scores: Scores, completions: Sequence[Named]) -> list[float]:
    try:
        given = scores([completion for _, completion in completions])
    except DataError as error:
        raise DataError(f"the reward {name}: {error}") from error
    least, largest = reward.bounds
    values: list[float] = []
    for place, _ in completions:
        try:
            value = next(given)
        except DataError as error:
            raise DataError(f"{place}: the reward {name}: {error}") from error
        # NaN is in no range; an infinite number would be within infinite bounds
        if not least <= value <= largest or abs(value) == float("inf"):
            expected = "a finite number" if largest == float("inf") else f"a number from {least:g} to {largest:g}"
            raise DataError(f"{place}: the reward {name} is {value:g}; expected {expected}")
        values.append(value)
    return values
