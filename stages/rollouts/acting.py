"""Episodes of a served model: played some at a time, and kept as JSON Lines until all are there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.data.config import DEFAULT_DATE
from stages.data.messages import Message, RowError, ordered, parse_messages
from stages.data.tokenizer import DocumentTokenizer
from stages.models.model_folder import end_tokens
from stages.models.recorded import noted_date
from stages.rewards.judging import Judge, Judgement, Named
from stages.rollouts.asking import (
    OF_EVERY_TOKEN,
    Answer,
    PromptSample,
    Request,
    Sample,
    ask_all,
    read_kept,
    request_seed,
    sampling_request,
    seed_of,
)
from stages.rollouts.environments.environment import ENVIRONMENT, EnvironmentConfig
from stages.rollouts.environments.episodes import Episode, Episodes, TurnReader, TurnRequest
from stages.rollouts.episode_table import EpisodeRow, StoredSegment
from stages.rollouts.options import SamplingOptions
from stages.rollouts.prompts import RenderedPrompt
from stages.serving.served_models import ServedModel

SERVER = "the server that samples"
PLAYED_TOGETHER = 4
"""Number of episodes that are played together, for each request that is sent concurrently."""


class PlayedEpisode(Sample):
    """Episode of a prompt, as stored. text: what rewards see. truncated: it ended at a bound. num_tokens: sampled.

    failure: how the environment failed. reward: the environment's own; None of one that gives none. asked, answer:
    messages of the prompt, and after it. prompt_text, prompt_ids: with what the environment showed first.
    """

    transcript: str
    end: str
    failure: str | None = None
    reward: float | None
    metrics: dict[str, float]
    asked: list[dict[str, Any]]
    answer: list[dict[str, Any]]
    prompt_text: str
    prompt_ids: list[int]
    segments: list[StoredSegment]

    @property
    def question(self) -> list[Message]:
        return self.asked

    @property
    def messages(self) -> list[Message]:
        return self.answer

    @property
    def whole(self) -> str:
        return self.transcript

    @property
    def bound(self) -> str:
        named = {
            "turns": "max_turns",
            "seconds": "max_episode_s",
            "template": "what the chat template shows",
            "failed": "a failure of the environment",
        }
        return named.get(self.end, super().bound)

    @property
    def flaw(self) -> str | None:
        if self.truncated:
            return super().flaw
        if self.metrics["malformed_calls"] or self.metrics["failed_calls"]:
            return "a call of it failed"
        try:
            ordered(parse_messages([*self.asked, *self.answer], "messages"))
        except RowError as error:
            return f"training refuses it: it {error}"
        return None

    @classmethod
    def of(cls, job: PromptSample, episode: Episode, tokenizer: DocumentTokenizer) -> PlayedEpisode:
        """Return what is stored of an episode that is over."""
        assert episode.end
        transcript = tokenizer.decode(episode.after_prompt)
        sampled = [len(segment.token_ids) for segment in episode.segments if segment.author == "model"]
        return cls(
            prompt=job[0],
            sample=job[1],
            seed=episode.start.seed,
            text=transcript if episode.config.rewards_see == "transcript" else episode.text,
            num_tokens=sum(sampled),
            truncated=episode.end != "done",
            transcript=transcript,
            end=episode.end,
            failure=episode.failure,
            reward=episode.reward if episode.config.gives_rewards else None,
            metrics=episode.metrics,
            asked=episode.start.prompt.messages,
            answer=episode.messages,
            prompt_text=tokenizer.decode(episode.start.token_ids),
            prompt_ids=episode.start.token_ids,
            segments=[
                StoredSegment(author=one.author, token_ids=one.token_ids, log_probabilities=one.log_probabilities)
                for one in episode.segments
            ],
        )


@dataclass(frozen=True)
class ServedTurn:
    """Turn that a server sampled; implements `SampledTurn`."""

    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    truncated: bool


def turn_reader(
    tokenizer_folder: Path, model_folder: Path, environment: EnvironmentConfig, prompts: Sequence[RenderedPrompt]
) -> TurnReader:
    """Return the reader of a model's turns. Raises DataError if its chat template is unfit for the environment.

    tokenizer_folder: of the model or adapter that is asked. model_folder: of an adapter's base, else the same.
    """
    date = noted_date(tokenizer_folder) or DEFAULT_DATE
    tokenizer = DocumentTokenizer(tokenizer_folder, None, "assistant", template_date=date)
    return TurnReader.proved(tokenizer, end_tokens(model_folder), environment, prompts[0].episode(0).prompt)


def play_all(
    served: ServedModel,
    prompts: Sequence[RenderedPrompt],
    environment: EnvironmentConfig,
    options: SamplingOptions,
    kept: Path,
    report: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> list[PlayedEpisode]:
    """Play `num_samples` episodes of each prompt, and return them in the order of the prompts.

    options: `max_tokens` is of a turn. kept: file that episodes are appended to; those in it are not played again.
    report(done, all): called now and then. warn: called with what people should know of this machine. Raises DataError
    for an environment that fails or does not suit the model's template, and as `ask_all` does.
    """
    for warning in environment.warnings():
        warn(warning)
    reader = turn_reader(served.asked_folder, served.folder, environment, prompts)
    played = {(one.prompt, one.sample): one for one in read_kept(kept, PlayedEpisode)}
    jobs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(options.num_samples)]
    missing = [job for job in jobs if job not in played]
    size = options.concurrent_requests * PLAYED_TOGETHER

    def sample(requests: Sequence[TurnRequest]) -> list[ServedTurn]:
        return sample_turns(served, options, requests)

    with environment.opened(kept.parent) as make, kept.open("a", encoding="utf-8") as stream:
        episodes = Episodes(environment, make, reader, served.context_tokens, options.max_tokens, request_seed)
        for some in (missing[begin : begin + size] for begin in range(0, len(missing), size)):
            starts = [prompts[prompt].episode(seed_of(options, prompt, number)) for prompt, number in some]
            for job, episode in zip(some, episodes.play(starts, sample), strict=True):
                played[job] = PlayedEpisode.of(job, episode, reader.tokenizer)
                if episode.end != "failed":  # another attempt may do better
                    stream.write(played[job].model_dump_json() + "\n")
            stream.flush()
            report(len(played), len(jobs))
    return [played[job] for job in jobs]


def sample_turns(served: ServedModel, options: SamplingOptions, requests: Sequence[TurnRequest]) -> list[ServedTurn]:
    """Sample a turn after each prompt, and return them in the order of the requests; raise as `ask_all` does."""
    found: dict[int, ServedTurn] = {}

    def keep(number: int, _: Request, answer: Answer) -> None:
        choice = answer.choices[0]
        found[number] = ServedTurn(*choice.sampled(SERVER), choice.written(SERVER), choice.finish_reason == "length")

    model = {"model": served.client.model}
    bodies = (
        model | sampling_request(one.token_ids, options, one.max_tokens, one.seed) | OF_EVERY_TOKEN for one in requests
    )
    ask_all(served.client, enumerate(bodies), options.concurrent_requests, keep)
    return [found[number] for number in range(len(requests))]


def judged(judge: Judge, named: Sequence[Named], episodes: Sequence[PlayedEpisode]) -> list[Judgement]:
    """Return the judgements of episodes; an environment's own reward counts beside those of the recipe."""
    return [
        judgement
        if one.reward is None
        else Judgement({ENVIRONMENT: one.reward, **judgement.rewards}, judgement.total + one.reward)
        for judgement, one in zip(judge(named), episodes, strict=True)
    ]


def episode_metrics(episodes: Sequence[PlayedEpisode]) -> dict[str, float]:
    """Return the means of the episodes' metrics, by the names that training gives them."""
    return {f"episode_{name}": statistics.fmean(one.metrics[name] for one in episodes) for name in episodes[0].metrics}


def episode_rows(
    prompts: Sequence[RenderedPrompt], episodes: Sequence[PlayedEpisode], judgements: Sequence[Judgement]
) -> list[EpisodeRow]:
    """Return episodes as rows of their table, with what rewards gave to each."""
    rows = []
    for episode, judgement in zip(episodes, judgements, strict=True):
        asked = prompts[episode.prompt]
        rows.append(
            EpisodeRow(
                row=str(asked.place),
                prompt=episode.prompt_text,
                reference=asked.prompt.reference,
                step=None,
                sample=episode.sample,
                seed=episode.seed,
                text=episode.text,
                transcript=episode.transcript,
                end=episode.end,
                num_tokens=episode.num_tokens,
                total=judgement.total,
                prompt_ids=episode.prompt_ids,
                segments=episode.segments,
                rewards=judgement.rewards,
                metrics=episode.metrics,
            )
        )
    return rows
