"""Client that sends many completion requests to a server concurrently, and sampling of answers to a dataset's prompts.

By aiohttp: on the cores that a server on a CPU needs, a request costs a tenth of httpx's time. Prompts with pictures
are asked of the engine itself, since its proxy passes no prompts of token ids and pictures on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import aiohttp
import numpy as np
from pydantic import ValidationError

from stages.core.errors import ServerError, TransientError
from stages.core.fields import StrictModel
from stages.core.files import remove_cut_off_line
from stages.data.messages import Message, make_message
from stages.remote import http
from stages.remote.http import (
    AnswerModel,
    Expected,
    RetryBackoff,
    ask_aiohttp,
    busy_from_status,
    busy_from_transport,
    server_headers,
)
from stages.rollouts.options import SamplingOptions
from stages.rollouts.pictures import PromptPictures
from stages.serving.client import CHAT, COMPLETIONS, ChatAnswer, Choice, Choices, Client, answer_bytes

if TYPE_CHECKING:  # what its HTTP imports would bring
    from stages.serving.backend import EngineAddress
    from stages.serving.engine import Engine

Request = dict[str, Any]
"""Body of an HTTP request for completions, to `/v1/completions`; with `PICTURES`, if its prompt has some."""
PICTURES = "pictures"
"""Field of a request with the pictures of its prompt (`PromptPictures`), which are read when it is sent."""
OF_EVERY_TOKEN: Request = {
    "logprobs": 0,  # of the sampled token alone
    "return_token_ids": True,
    # Set explicitly, since vLLM would else take them from the model's generation config.
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields of a request that may sample every token, and is answered with the id and log-probability of each sampled."""
Answer = Choices[Choice]
Job = TypeVar("Job")
Shape = TypeVar("Shape", bound=AnswerModel)


class Sampled(Protocol):
    """Protocol of options of how tokens are sampled."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def stop(self) -> tuple[str, ...]: ...


class AskedServer(Protocol):
    """Protocol of a server whose engine is reached itself, for prompts with pictures."""

    @property
    def engine(self) -> Engine: ...
    @property
    def address(self) -> EngineAddress: ...


def ask_all(
    client: Client,
    requests: Iterable[tuple[Job, Request]],
    concurrent: int,
    keep: Callable[[Job, Request, Answer], None],
    stall_s: float | None = None,
    *,
    server: AskedServer | None = None,
) -> None:
    """Send completion requests, `concurrent` at a time; pass each answer to `keep` as it arrives.

    requests: pairs of any identifying value and a body. server: for requests with pictures. Raises ServerError for a
    request that is refused, TransientError when the server is gone, or gives no answer at all for `stall_s` seconds;
    DataError for a picture that has changed.
    """
    asyncio.run(_ask_all(client, requests, concurrent, keep, _Route(COMPLETIONS, Answer, stall_s, server)))


def ask_chats(
    client: Client,
    requests: Iterable[tuple[Job, Request]],
    concurrent: int,
    keep: Callable[[Job, Request, ChatAnswer], None],
) -> None:
    """Send chats, as `ask_all`; a body is taken from `requests` when it is sent, so that few are in memory at once."""
    asyncio.run(_ask_all(client, requests, concurrent, keep, _Route(CHAT, ChatAnswer)))


@dataclass(frozen=True)
class _Route(Generic[Shape]):
    """Path of a server, with the form of its answers. stall_s, server: as of `ask_all`."""

    path: str
    shape: type[Shape]
    stall_s: float | None = None
    server: AskedServer | None = None


async def _ask_all(
    client: Client,
    requests: Iterable[tuple[Job, Request]],
    concurrent: int,
    keep: Callable[[Job, Request, Shape], None],
    route: _Route[Shape],
) -> None:
    # one iterator for all workers: each takes the next request when it is free
    remaining = iter(requests)
    num_answers = 0
    headers = server_headers(client.api_key)
    connections = aiohttp.TCPConnector(limit=concurrent)  # aiohttp's own limit is 100
    async with aiohttp.ClientSession(headers=headers, connector=connections) as session:

        async def work() -> None:
            nonlocal num_answers
            for job, request in remaining:
                expected = client.expected(route.path, answer_bytes(request))
                if PICTURES in request:
                    answer = await _seeing_answer(route.server, expected, request)
                else:
                    answer = (await _answer(session, expected, expected.server, request)).parsed(route.shape)
                keep(job, request, answer)
                num_answers += 1

        workers = [asyncio.create_task(work()) for _ in range(concurrent)]
        running = set(workers)
        try:
            while running:
                before = num_answers
                # The time limit is for the next answer of any worker, not for all: see `before`.
                ended, running = await asyncio.wait(workers, timeout=route.stall_s, return_when=asyncio.FIRST_EXCEPTION)
                for worker in ended:
                    worker.result()  # raises what ended it
                if running and num_answers == before:
                    raise TransientError(f"{client.url} gave no answer for {route.stall_s:g} s")
        finally:
            for worker in workers:
                worker.cancel()
            # Cancelled workers are waited for, so that none still uses the session when it closes.
            await asyncio.gather(*workers, return_exceptions=True)


async def _seeing_answer(server: AskedServer | None, expected: Expected, request: Request) -> Any:
    """Ask an engine itself for completions of a prompt with pictures, in the form of `/v1/completions`."""
    assert server, "prompts with pictures are for engines that are reached"
    pictures: PromptPictures = request[PICTURES]
    # in a thread: pictures are read from disk meanwhile
    document = await asyncio.to_thread(pictures.seen, request["prompt"])
    route, body = server.engine.seeing_request(request, document)
    headers = server_headers(expected.key)
    async with aiohttp.ClientSession(headers=headers, connector=server.address.connector()) as session:
        answer = await _answer(session, replace(expected, server=route), server.address.url / route, body)
    return server.engine.seeing_answer(answer, document)


async def _answer(session: aiohttp.ClientSession, expected: Expected, url: Any, request: Request) -> http.Answer:
    """Send one request, and repeat it a few times while the server is busy or does not answer."""
    backoff = RetryBackoff("asking for a completion")
    while True:
        try:
            answer = await ask_aiohttp(session, expected, "POST", url, json=request)
            busy = busy_from_status(answer.status, answer.headers)
            if busy is None:
                return answer
        except (aiohttp.ClientError, OSError) as error:
            busy = busy_from_transport(error)
        # in a thread: it sleeps, and the other workers go on
        await asyncio.to_thread(backoff.wait, busy)


PromptSample = tuple[int, int]
"""Key of a sampled completion: number of the prompt, and number of the sample among those of the prompt."""


class Sample(StrictModel):
    """Sampled completion of a prompt (by number), as stored. truncated: cut off at `max_tokens`."""

    prompt: int
    sample: int
    seed: int
    text: str
    num_tokens: int
    truncated: bool

    @property
    def question(self) -> list[Message] | None:
        """Messages of the prompt where an environment added to it; None where it did not."""
        return None

    @property
    def messages(self) -> list[Message]:
        """Messages after the prompt, as a training row has them."""
        return [make_message("assistant", self.text)]

    @property
    def whole(self) -> str:
        """Text of all that followed the prompt."""
        return self.text

    @property
    def bound(self) -> str:
        """Field of the bound at which it was cut off, if it was."""
        return "max_tokens"

    @property
    def flaw(self) -> str | None:
        """Reason why it should not be learned from; None without one."""
        return f"it was cut off at {self.bound}" if self.truncated else None


Kept = TypeVar("Kept", bound=Sample)


def sample_all(
    client: Client,
    prompts: Sequence[list[int]],
    options: SamplingOptions,
    kept: Path,
    report: Callable[[int, int], None],
    *,
    pictures: Mapping[int, PromptPictures] = MappingProxyType({}),
    server: AskedServer | None = None,
) -> list[Sample]:
    """Sample `num_samples` completions of each prompt (token ids), and return them in the order of the prompts.

    kept: file that each completion is appended to; those in it are not asked for again. report(done, all): called after
    each. pictures: of prompts by their numbers. server: as of `ask_all`, which it also raises as.
    """
    samples = {(sample.prompt, sample.sample): sample for sample in read_kept(kept, Sample)}
    jobs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(options.num_samples)]
    with kept.open("a", encoding="utf-8") as stream:

        def keep(job: PromptSample, request: Request, answer: Answer) -> None:
            samples[job] = sample = _sample(job, request, answer)
            stream.write(sample.model_dump_json() + "\n")
            # A kill from here on loses no answer that was counted.
            stream.flush()
            report(len(samples), len(jobs))

        missing = (job for job in jobs if job not in samples)
        requests = (
            (
                job,
                {
                    "model": client.model,
                    **sampling_request(prompts[job[0]], options, options.max_tokens, seed_of(options, *job)),
                    **({PICTURES: pictures[job[0]]} if job[0] in pictures else {}),
                },
            )
            for job in missing
        )
        ask_all(client, requests, options.concurrent_requests, keep, server=server)
    return [samples[job] for job in jobs]


def seed_of(options: SamplingOptions, prompt: int, sample: int) -> int:
    """Return the seed of one completion, computed from the recipe's seed and the numbers of prompt and sample."""
    return request_seed(options.seed, prompt, sample)


def request_seed(*numbers: int) -> int:
    """Return a seed of at most 31 bits for a sampling request, computed from numbers that identify the request."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


def _sample(job: PromptSample, request: Request, answer: Answer) -> Sample:
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


def sampling_request(prompt: list[int], options: Sampled, max_tokens: int, seed: int) -> Request:
    """Return a request for a completion of a prompt (token ids), without the server's name of the model."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": list(options.stop) or None,
        "seed": seed,
    }


def read_kept(kept: Path, shape: type[Kept]) -> Iterator[Kept]:
    """Yield the samples in a file; remove its last line if a killed process wrote it only partly."""
    remove_cut_off_line(kept)
    for line in kept.read_bytes().splitlines() if kept.exists() else ():
        with suppress(ValidationError):
            yield shape.model_validate_json(line)
