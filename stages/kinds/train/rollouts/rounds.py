"""Sampling of completions from the model in training, on rank 0, for every method that samples.

Rounds, for methods with rewards, are also scored and written to a file that all processes read.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from stages.core.errors import ServerError
from stages.core.files import write_atomically
from stages.data.mixture import MixtureOrder
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions
from stages.kinds.train.rollouts.documents import AnsweredPrompt
from stages.kinds.train.rollouts.server import PolicyServer
from stages.rewards.judging import Judge, Judgement, Named
from stages.rollouts.asking import OF_EVERY_TOKEN, PICTURES, Answer, Request, request_seed, sampling_request
from stages.rollouts.environments.environment import ENVIRONMENT
from stages.rollouts.environments.episodes import Episode, Episodes, TurnRequest, play_together
from stages.rollouts.episode_table import StoredSegment
from stages.rollouts.pictures import PromptPictures
from stages.rollouts.prompts import RenderedPrompt
from stages.serving.client import Choice


@dataclass(frozen=True)
class Completion:
    """A sampled completion with the server's log-probabilities (nats a token), and rewards if the method has them.

    truncated: at `max_completion_length`. rewards: by the recipe's names. reward: their weighted sum.
    environment_spans: of an episode, places in `token_ids` of what the environment wrote, which is not learned, whose
    log-probabilities are 0. episode: its metrics. transcript: text of all its turns; `text` is what rewards see.
    prompt: where the environment added to it. environment: name of that of several, else "".
    """

    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    truncated: bool
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    environment_spans: list[tuple[int, int]] = field(default_factory=list)
    episode: dict[str, float] = field(default_factory=dict)
    transcript: str | None = None
    prompt: list[int] | None = None
    prompt_text: str = ""
    seed: int | None = None
    end: str | None = None
    environment: str = ""

    @classmethod
    def of(cls, episode: Episode) -> Completion:
        """Return an episode as one completion, with the environment's own reward, if it gives any."""
        config, tokenizer = episode.config, episode.reader.tokenizer
        transcript = tokenizer.decode(episode.after_prompt)
        return cls(
            episode.after_prompt,
            episode.log_probabilities,
            transcript if config.rewards_see == "transcript" else episode.text,
            episode.end == "tokens",
            {ENVIRONMENT: episode.reward} if config.gives_rewards and episode.end != "failed" else {},
            episode.reward,
            episode.environment_spans,
            episode.metrics,
            transcript,
            episode.start.token_ids,
            tokenizer.decode(episode.start.token_ids),
            episode.start.seed,
            episode.end,
            episode.start.environment,
        )

    @property
    def has_failed(self) -> bool:
        """Return whether the environment of an episode failed, so that what it is worth is unknown."""
        return self.end == "failed"

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.token_ids) - sum(end - begin for begin, end in self.environment_spans)

    @property
    def segments(self) -> Iterator[StoredSegment]:
        """Segments of an episode: parts of its tokens in turn by the model and by the environment."""
        begin, end = 0, len(self.token_ids)
        for start, stop in [*self.environment_spans, (end, end)]:
            if begin < start:
                of_model = slice(begin, start)
                yield StoredSegment(
                    author="model",
                    token_ids=self.token_ids[of_model],
                    log_probabilities=self.log_probabilities[of_model],
                )
            if start < stop:
                yield StoredSegment(author="environment", token_ids=self.token_ids[start:stop], log_probabilities=[])
            begin = stop

    def after(
        self,
        prompt: list[int],
        advantage: float = 0.0,
        *,
        is_learned: bool = True,
        pictures: PromptPictures | None = None,
    ) -> AnsweredPrompt:
        """Return the training document that consists of `prompt`, with its pictures, and this completion."""
        return AnsweredPrompt(
            self.prompt or prompt,
            self.token_ids,
            self.log_probabilities,
            advantage,
            is_learned,
            pictures,
            self.environment_spans,
        )

    @property
    def shown(self) -> dict[str, object]:
        """Values of a completion that are written to `completions.jsonl` for people to read."""
        shown = {"text": self.transcript or self.text, "num_tokens": self.num_sampled, "truncated": self.truncated}
        named = {"environment": self.environment} if self.environment else {}
        return {**named, **shown, **({"episode": self.episode} if self.episode else {})}


@dataclass(frozen=True)
class Group:
    """Sampled completions of one prompt (by number), whose rewards are compared with each other."""

    prompt: int
    completions: list[Completion]

    @property
    def has_signal(self) -> bool:
        return len({one.reward for one in self.completions if not one.has_failed}) > 1


@dataclass(frozen=True)
class Round:
    """Round of sampling: groups of completions that are sampled together with the same weights.

    first_step: the first optimizer step that learns from them. measured: metrics of the sampling. weights_step: the
    last optimizer step of the weights that sampled, 0 for those before training; None where it was not noted.
    """

    first_step: int
    groups: list[Group]
    measured: dict[str, float]
    weights_step: int | None = None

    @property
    def completions(self) -> list[Completion]:
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
    """Plan of the sampling rounds, by seed and step: which steps learn from a round, and which prompts it completes.

    num_prompts: of each environment, one after another. weights: shares of a round's prompts, relative to each other.
    """

    num_prompts: tuple[int, ...]
    prompts_per_round: int
    options: RolloutOptions
    seed: int
    weights: tuple[float, ...] = (1.0,)

    @property
    def steps_per_round(self) -> int:
        return self.options.steps_per_generation * self.options.num_iterations

    def staleness(self, step: int) -> int:
        """Return the number of steps that have learned from a step's completions before; less than `steps_per_round`.

        Without lag it is the age of the weights that sampled them.
        """
        return (step - 1) % self.steps_per_round

    @property
    def lag_steps(self) -> int:
        """Number of steps by which the weights that sample a round are older than those that first learn from it."""
        return self.options.asynchronous.lag * self.steps_per_round

    def weights_step(self, first_step: int) -> int:
        """Return the last step of the weights that sample the round from `first_step`; 0 before training."""
        return max(0, first_step - 1 - self.lag_steps)

    def started_at(self, step: int, last_step: int, *, begins: bool) -> range:
        """Return the first steps of rounds whose sampling starts before the round from `step` is learned.

        begins: `step` is the first of an attempt, with no round under way yet.
        """
        newest = step + self.lag_steps
        return range(step if begins else newest, min(newest, last_step) + 1, self.steps_per_round)

    def part(self, step: int) -> int:
        """Return which of a round's `steps_per_generation` parts a training step learns from, counted from 0."""
        return self.staleness(step) % self.options.steps_per_generation

    def prompts(self, first_step: int) -> list[int]:
        """Return the numbers of the prompts that are completed in the sampling round that begins with `first_step`."""
        order = MixtureOrder(self.num_prompts, tuple(one / sum(self.weights) for one in self.weights), self.seed)
        # Rank 0 samples a round whole, so it is not cut into shares of processes.
        return order.rows((first_step - 1) // self.steps_per_round * self.prompts_per_round, self.prompts_per_round)

    def environment(self, prompt: int) -> int:
        """Return which of the environments, counted from 0, a prompt is of."""
        return bisect_right([*accumulate(self.num_prompts)], prompt)

    def others(self, first_step: int, draw: int, counts: Sequence[int]) -> list[int]:
        """Return other prompts, `counts` of each environment, to replace groups of equal rewards.

        draw: the redraw's number, from 1 on.
        """
        random = np.random.default_rng([self.seed, first_step, draw])
        prompts: list[int] = []
        for first, size, count in zip(accumulate(self.num_prompts, initial=0), self.num_prompts, counts, strict=False):
            # without repetitions, unless there are fewer prompts than wanted
            prompts += (first + random.choice(size, count, replace=count > size)).tolist()
        return prompts


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation of the values."""
    return float(np.std(values))


SERVER = "the server that samples"
CUT_OFF = "length"


@dataclass(frozen=True)
class PromptRequest:
    """Prompt for the sampling server, as token ids, with its seed, `max_tokens` of a completion, and its pictures."""

    prompt: list[int]
    seed: int
    max_tokens: int
    pictures: PromptPictures | None = None

    def request(self, options: SamplingOptions, num_completions: int, media_tokens: Collection[int]) -> Request:
        return {
            **sampling_request(self.prompt, options, self.max_tokens, self.seed),
            **OF_EVERY_TOKEN,
            "n": num_completions,
            **({"stop_token_ids": sorted(media_tokens)} if media_tokens else {}),
            **({PICTURES: self.pictures} if self.pictures else {}),
        }


def sample_completions(
    server: PolicyServer,
    options: SamplingOptions,
    asked: Sequence[PromptRequest],
    num_completions: int,
    media_tokens: Collection[int] = (),
) -> list[list[Completion]]:
    """Return `num_completions` completions of each prompt from the server, in the order of the prompts.

    media_tokens: those that stand for pictures. A completion ends before one, which no picture would be there for.
    Raises ServerError for an answer without what a loss needs, and as `PolicyServer.ask` does.
    """
    found: dict[int, list[Completion]] = {}

    def keep(position: int, _: Request, answer: Answer) -> None:
        if len(answer.choices) != num_completions:
            raise ServerError(
                f"{SERVER} answered with {len(answer.choices)} completions, where {num_completions} were asked for"
            )
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        found[position] = [_completion(choice, media_tokens) for choice in choices]

    requests = (one.request(options, num_completions, media_tokens) for one in asked)
    server.ask(enumerate(requests), keep)
    return [found[position] for position in range(len(asked))]


def _completion(choice: Choice, media_tokens: Collection[int]) -> Completion:
    token_ids, log_probabilities = choice.sampled(SERVER)
    if token_ids and token_ids[-1] in media_tokens:
        token_ids, log_probabilities = token_ids[:-1], log_probabilities[:-1]
    return Completion(token_ids, log_probabilities, choice.written(SERVER), choice.finish_reason == CUT_OFF)


@dataclass(frozen=True)
class Sampler:
    """Sampler of a round's completions, which also judges them by rewards and measures how long each part takes."""

    server: PolicyServer
    judge: Judge
    prompts: Sequence[RenderedPrompt]
    options: RolloutOptions
    plan: RoundPlan
    media_tokens: Collection[int] = ()
    players: Mapping[str, Episodes] = field(default_factory=dict)
    """Players of episodes by the environment's name, where completions are such; {} for one answer to each prompt."""

    def sample(self, first_step: int) -> Round:
        """Sample and score the completions of the round from `first_step`; raise DataError where scoring fails."""
        generate_s = score_s = 0.0
        num_tokens = num_draws = 0
        groups: list[Group] = []
        # DAPO's dynamic sampling: groups of equal rewards have advantage 0, and are replaced while draws remain.
        # Those that replace them are of the same environment, which keeps its share.
        planned = self.plan.prompts(first_step)
        while num_draws < self.options.max_draws and any(missing := self._missing(planned, groups)):
            prompts = self.plan.others(first_step, num_draws, missing) if num_draws else planned
            # of the position too: the same prompt, drawn twice, must not get the same completions
            asked = [self._request(prompt, first_step, num_draws, position) for position, prompt in enumerate(prompts)]
            began_s = time.perf_counter()
            completions = self._answers(prompts, asked)
            answered_s = time.perf_counter()
            drawn = self._judged(prompts, completions)
            generate_s, score_s = generate_s + answered_s - began_s, score_s + time.perf_counter() - answered_s
            num_tokens += sum(one.num_sampled for group in drawn for one in group.completions)
            # Groups with signal come first, each kind in the order drawn (the sort is stable).
            groups = self._chosen(planned, sorted([*groups, *drawn], key=lambda group: not group.has_signal))
            num_draws += 1
        measured = {
            "generate_s": generate_s,
            "score_s": score_s,
            "generate_tokens_per_s": num_tokens / generate_s,
            "score_tokens_per_s": num_tokens / score_s,
            "num_draws": float(num_draws),
        }
        return Round(first_step, groups, measured)

    def answer_all(self) -> Round:
        """Sample and score completions of every prompt, with the same seeds at each call; raises as `sample` does."""
        # rounds begin with a step from 1 on
        asked = [self._request(prompt, 0, 0, prompt) for prompt in range(len(self.prompts))]
        numbers = range(len(self.prompts))
        return Round(0, self._judged(numbers, self._answers(numbers, asked)), {})

    def _request(self, prompt: int, *seeds: int) -> PromptRequest:
        asked, most = self.prompts[prompt], self.options.max_completion_length
        return PromptRequest(asked.token_ids, request_seed(self.plan.seed, *seeds), most, asked.pictures)

    def _answers(self, prompts: Sequence[int], asked: Sequence[PromptRequest]) -> list[list[Completion]]:
        number = self.options.num_generations
        if not self.players:
            return sample_completions(self.server, self.options, asked, number, self.media_tokens)
        starts = [
            self.prompts[prompt].episode(request_seed(request.seed, index))
            for prompt, request in zip(prompts, asked, strict=True)
            for index in range(number)
        ]
        played = iter(play_together(self.players, starts, self._turns))
        return [[Completion.of(next(played)) for _ in range(number)] for _ in asked]

    def _turns(self, requests: Sequence[TurnRequest]) -> list[Completion]:
        asked = [PromptRequest(one.token_ids, one.seed, one.max_tokens) for one in requests]
        return [turn for (turn,) in sample_completions(self.server, self.options, asked, 1)]

    def _missing(self, planned: Sequence[int], groups: Sequence[Group]) -> list[int]:
        """Return how many more groups with differing rewards a sampling round needs of each environment."""
        missing = Counter(map(self.plan.environment, planned))
        missing.subtract(self.plan.environment(group.prompt) for group in groups if group.has_signal)
        return [missing[number] for number in range(len(self.plan.num_prompts))]

    def _chosen(self, planned: Sequence[int], groups: Sequence[Group]) -> list[Group]:
        """Return the first groups of each environment, as many as were planned."""
        room, chosen = Counter(map(self.plan.environment, planned)), []
        for group in groups:
            if room[number := self.plan.environment(group.prompt)]:
                room[number] -= 1
                chosen.append(group)
        return chosen

    def _judged(self, prompts: Sequence[int], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        named: list[Named] = []
        for number, group in zip(prompts, completions, strict=True):
            asked = self.prompts[number]
            for index, one in enumerate(group):
                completion = asked.completion(one.text, one.num_sampled)
                named.append((f"completion {index} of the prompt in {asked.place}", completion))
        # flat, completion by completion in the order of `named`; taken apart into groups again below
        environments = [one.environment for group in completions for one in group]
        by_place: dict[int, Judgement] = {}
        for name in dict.fromkeys(environments):
            own = [place for place, environment in enumerate(environments) if environment == name]
            by = self.options.environments[name].rewards if name else None
            by_place |= zip(own, self.judge([named[place] for place in own], by), strict=True)
        judgements = iter(by_place[place] for place in range(len(named)))
        groups = []
        for prompt, group in zip(prompts, completions, strict=True):
            scores = [next(judgements) for _ in group]
            judged = [
                # an environment's own reward, if any, counts beside those of the recipe
                replace(one, rewards={**one.rewards, **score.rewards}, reward=one.reward + score.total)
                for one, score in zip(group, scores, strict=True)
            ]
            groups.append(Group(prompt, judged))
        return groups
