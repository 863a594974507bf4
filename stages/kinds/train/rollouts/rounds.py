"""Rounds of completions: the plan of prompts, sampling and scoring on rank 0, and the file that all processes read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from stages.core.errors import ServerError
from stages.core.files import write_atomically
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions
from stages.kinds.train.order import DataOrder
from stages.kinds.train.rollouts.server import RolloutServer
from stages.rewards.judging import Judge, Judgement, Named
from stages.rollouts.asking import Answer, Request
from stages.rollouts.prompts import AskedPrompt
from stages.serving.client import Choice


@dataclass(frozen=True)
class Completion:
    """A sampled completion with its score.

    log_probabilities: the server's, of each token, in nats.
    truncated: cut off at `max_completion_length`.
    rewards: each reward by the recipe's name for it.
    reward: their weighted sum.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    truncated: bool
    rewards: dict[str, float]
    reward: float


@dataclass(frozen=True)
class Group:
    """The completions of one prompt.

    prompt: its number.
    """

    prompt: int
    completions: list[Completion]

    @property
    def has_signal(self) -> bool:
        """True if the completions' rewards differ, so that the group gives a gradient."""
        return len({one.reward for one in self.completions}) > 1


@dataclass(frozen=True)
class Round:
    """Round of completions that are sampled together.

    first_step: the first optimizer step that learns from them.
    measured: metrics of the sampling.
    """

    first_step: int
    groups: list[Group]
    measured: dict[str, float]

    @property
    def completions(self) -> list[Completion]:
        """The completions of all groups, one group after the other."""
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
    """Plan of rounds: which steps learn from a round and which prompts it asks, as functions of seed and step."""

    num_prompts: int
    prompts_per_round: int
    options: RolloutOptions
    seed: int

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps that learn from one round."""
        return self.options.steps_per_generation * self.options.num_iterations

    def staleness(self, step: int) -> int:
        """Return the steps between the weights that sampled and those that learn; less than `steps_per_round`."""
        return (step - 1) % self.steps_per_round

    def part(self, step: int) -> int:
        """Return which of the `steps_per_generation` parts of a round's completions a step learns from."""
        return self.staleness(step) % self.options.steps_per_generation

    def prompts(self, first_step: int) -> list[int]:
        """Return the prompt numbers of the round that begins with this step."""
        order = DataOrder(self.num_prompts, self.prompts_per_round, 1, 0, 1, self.seed)
        return order.global_batch((first_step - 1) // self.steps_per_round + 1)

    def others(self, first_step: int, draw: int, count: int) -> list[int]:
        """Return `count` prompts that replace groups without signal; draw: the number of the redraw, from 1 on."""
        random = np.random.default_rng([self.seed, first_step, draw])
        return random.choice(self.num_prompts, count, replace=count > self.num_prompts).tolist()

    def request_seed(self, first_step: int, draw: int, position: int) -> int:
        """Return the seed of a group's first completion; the server adds the sample's number for the others."""
        return int(np.random.SeedSequence((self.seed, first_step, draw, position)).generate_state(1)[0]) >> 1


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation."""
    return float(np.std(values))


SERVER = "the server that samples"
CUT_OFF = "length"
EVERY_TOKEN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling options that keep vLLM from using defaults of the model's generation config."""


@dataclass(frozen=True)
class Sampler:
    """Sampler of completions, which also scores a round and measures the time of each part."""

    server: RolloutServer
    judge: Judge
    prompts: Sequence[AskedPrompt]
    options: RolloutOptions
    plan: RoundPlan

    def sample(self, first_step: int) -> Round:
        """Return the round that begins with this step. Raises DataError for completions that cannot be scored."""
        generate_s = score_s = 0.0
        num_tokens = num_draws = 0
        groups: list[Group] = []
        while num_draws < self.options.max_draws and (missing := self._missing(groups)):
            asked = self.plan.others(first_step, num_draws, missing) if num_draws else self.plan.prompts(first_step)
            seeds = [self.plan.request_seed(first_step, num_draws, position) for position in range(len(asked))]
            began_s = time.perf_counter()
            answers = self._answers(asked, seeds)
            answered_s = time.perf_counter()
            drawn = list(self._groups(asked, answers))
            generate_s, score_s = generate_s + answered_s - began_s, score_s + time.perf_counter() - answered_s
            num_tokens += sum(len(one.token_ids) for group in drawn for one in group.completions)
            # Groups with signal come first, each kind in the order drawn (the sort is stable).
            groups = sorted([*groups, *drawn], key=lambda group: not group.has_signal)[: self.plan.prompts_per_round]
            num_draws += 1
        measured = {
            "generate_s": generate_s,
            "score_s": score_s,
            "generate_tokens_per_s": num_tokens / generate_s,
            "score_tokens_per_s": num_tokens / score_s,
            "num_draws": float(num_draws),
        }
        return Round(first_step, groups, measured)

    def _missing(self, groups: Sequence[Group]) -> int:
        """Return how many groups with signal the round still lacks."""
        return self.plan.prompts_per_round - sum(group.has_signal for group in groups)

    def _answers(self, asked: Sequence[int], seeds: Sequence[int]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        options = self.options

        def keep(position: int, _: Request, answer: Answer) -> None:
            if len(answer.choices) != options.num_generations:
                raise ServerError(
                    f"{SERVER} answered with {len(answer.choices)} completions, where {options.num_generations} were "
                    "asked for"
                )
            for choice in answer.choices:
                choice.sampled(SERVER)  # checked before anything is judged
            answers[position] = answer

        requests = [
            (position, completion_request(options, self.prompts[prompt].token_ids, seed, options.num_generations))
            for position, (prompt, seed) in enumerate(zip(asked, seeds, strict=True))
        ]
        self.server.ask(requests, keep)
        return [answers[position] for position in range(len(asked))]

    def _groups(self, asked: Sequence[int], answers: Sequence[Answer]) -> Iterator[Group]:
        choices = [sorted(answer.choices, key=lambda choice: choice.index) for answer in answers]
        named = [
            self._named(self.prompts[prompt], number, choice)
            for prompt, group in zip(asked, choices, strict=True)
            for number, choice in enumerate(group)
        ]
        judgements = iter(self.judge(named))
        for prompt, group in zip(asked, choices, strict=True):
            yield Group(prompt, [_completion(choice, next(judgements)) for choice in group])

    def _named(self, prompt: AskedPrompt, number: int, choice: Choice) -> Named:
        completion = prompt.completion(choice.written(SERVER), len(choice.token_ids or ()))
        return f"completion {number} of the prompt in {prompt.place}", completion


def _completion(choice: Choice, judgement: Judgement) -> Completion:
    token_ids, log_probabilities = choice.sampled(SERVER)
    return Completion(
        token_ids=token_ids,
        log_probabilities=log_probabilities,
        text=choice.written(SERVER),
        truncated=choice.finish_reason == CUT_OFF,
        rewards=dict(judgement.rewards),
        reward=judgement.total,
    )


def completion_request(options: SamplingOptions, prompt: list[int], seed: int, num_completions: int) -> Request:
    """Return the request for `num_completions` completions of a prompt, given as token ids."""
    return {
        "prompt": prompt,
        "n": num_completions,
        "max_tokens": options.max_completion_length,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": list(options.stop) or None,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        **EVERY_TOKEN,
    }
