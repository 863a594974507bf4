"""A round: what was sampled for some optimizer steps, as rank 0 writes it to a file and every process reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from stages.core.files import write_atomically
from stages.kinds.train.methods.rollouts import RolloutOptions
from stages.kinds.train.order import DataOrder


@dataclass(frozen=True)
class Completion:
    """log_probabilities: of each token, in nats, by the server. truncated: cut off at `max_completion_length`.

    rewards: by the names that the recipe gives them. reward: their weighted sum.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    truncated: bool
    rewards: dict[str, float]
    reward: float


@dataclass(frozen=True)
class Group:
    """The completions of the prompt of this number."""

    prompt: int
    completions: list[Completion]

    @property
    def has_signal(self) -> bool:
        """Whether one is worth more than another."""
        return len({one.reward for one in self.completions}) > 1


@dataclass(frozen=True)
class Round:
    """first_step: the first optimizer step that learns from it. measured: metrics of the sampling."""

    first_step: int
    groups: list[Group]
    measured: dict[str, float]

    @property
    def completions(self) -> list[Completion]:
        """Of all groups, one after another."""
        return [one for group in self.groups for one in group.completions]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Round:
        return _READER.validate_json(path.read_bytes())


_READER = TypeAdapter(Round)


@dataclass(frozen=True)
class RoundPlan:
    """Which steps learn from one round, and which prompts it asks: functions of the seed and the step."""

    num_prompts: int
    prompts_per_round: int
    options: RolloutOptions
    seed: int

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps."""
        return self.options.steps_per_generation * self.options.num_iterations

    def staleness(self, step: int) -> int:
        """Optimizer steps between the weights that sampled and those that learn; less than `steps_per_round`."""
        return (step - 1) % self.steps_per_round

    def part(self, step: int) -> int:
        """Which of the `steps_per_generation` parts of its round's completions a step learns from."""
        return self.staleness(step) % self.options.steps_per_generation

    def prompts(self, first_step: int) -> list[int]:
        """Of the round that begins with this step."""
        order = DataOrder(self.num_prompts, self.prompts_per_round, 1, 0, 1, self.seed)
        return order.global_batch((first_step - 1) // self.steps_per_round + 1)

    def others(self, first_step: int, draw: int, count: int) -> list[int]:
        """In the place of `count` prompts that taught nothing; draw: from 1 on."""
        random = np.random.default_rng([self.seed, first_step, draw])
        return random.choice(self.num_prompts, count, replace=count > self.num_prompts).tolist()

    def request_seed(self, first_step: int, draw: int, position: int) -> int:
        """Of the first completion of a group; the server adds the number of the sample for the others."""
        return int(np.random.SeedSequence((self.seed, first_step, draw, position)).generate_state(1)[0]) >> 1


def deviation(values: Sequence[float]) -> float:
    """Standard deviation, of the values alone."""
    return float(np.std(values))
