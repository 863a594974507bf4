"""Prompts → completions, asked of a server many at a time.

Each is kept in a file as it arrives: what was asked before a kill is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from stages.core.errors import ServerError
from stages.core.files import remove_cut_off_line
from stages.core.strict import StrictModel
from stages.rollouts.asking import Answer, Request, ask_all
from stages.rollouts.options import SamplingOptions
from stages.serving.client import Client

Job = tuple[int, int]
"""Number of the prompt, number of the sample."""


class Sample(StrictModel):
    """A completion of the prompt number `prompt`. truncated: it was cut off at `max_tokens`."""

    prompt: int
    sample: int
    seed: int
    text: str
    num_tokens: int
    truncated: bool


def sample_all(
    client: Client,
    prompts: Sequence[list[int]],
    options: SamplingOptions,
    kept: Path,
    report: Callable[[int, int], None],
) -> list[Sample]:
    """`num_samples` completions of each prompt, given as token ids; in the order of the prompts.

    kept: file of those that were asked before. report(asked, all) is called after each.
    Raises ServerError for a request that is refused, TransientError when the server is gone for good.
    """
    found = {(one.prompt, one.sample): one for one in _read(kept)}
    jobs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(options.num_samples)]
    with kept.open("a", encoding="utf-8") as stream:

        def keep(job: Job, request: Request, answer: Answer) -> None:
            found[job] = sample = _sample(job, request, answer)
            stream.write(sample.model_dump_json() + "\n")
            stream.flush()
            report(len(found), len(jobs))

        missing = (job for job in jobs if job not in found)
        requests = ((job, _request(client.model, prompts[job[0]], options, seed_of(options, *job))) for job in missing)
        ask_all(client, requests, options.concurrent_requests, keep)
    return [found[job] for job in jobs]


def seed_of(options: SamplingOptions, prompt: int, sample: int) -> int:
    """Of one completion: no two share one, and the same recipe has the same."""
    return int(np.random.SeedSequence((options.seed, prompt, sample)).generate_state(1)[0]) >> 1


def _sample(job: Job, request: Request, answer: Answer) -> Sample:
    choice = answer.choices[0]
    if answer.usage is None or answer.usage.completion_tokens is None:
        raise ServerError("the server does not say how many tokens its completion has (`usage.completion_tokens`)")
    return Sample(
        prompt=job[0],
        sample=job[1],
        seed=request["seed"],
        text=choice.written("the server"),
        num_tokens=answer.usage.completion_tokens,
        truncated=choice.finish_reason == "length",
    )


def _request(model: str, prompt: list[int], options: SamplingOptions, seed: int) -> Request:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": list(options.stop) or None,
        "seed": seed,
    }


def _read(kept: Path) -> Iterator[Sample]:
    """Those that were written whole: a kill may have torn the last line, which is taken out of the file."""
    remove_cut_off_line(kept)
    for line in kept.read_bytes().splitlines() if kept.exists() else ():
        with suppress(ValidationError):
            yield Sample.model_validate_json(line)
