"""Load generator for OpenAI-compatible servers by streamed completions, for engines that come without their own."""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from stages.core.errors import ServerError
from stages.remote.http import EventReader, opened_aiohttp
from stages.serving.client import STREAM_TIMEOUT_S, ChatEvent, Client, answer_bytes
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import LoadResult

SEED = 0


@dataclass(frozen=True)
class Timing:
    """Timing of a benchmark request. first_s: until the first text. tokens: of the answer, by the server's count."""

    first_s: float
    total_s: float
    tokens: int


Request = dict[str, Any]


def generate_load(
    client: Client,
    vocabulary: int,
    benchmark: BenchmarkConfig,
    folder: Path,
    path: str = "/v1/completions",
    asked: Callable[[list[int]], Request] = lambda prompt: {"prompt": prompt},
    chats: Sequence[Request] = (),
) -> list[LoadResult]:
    """Measure latency and throughput at each concurrency, with random token ids as prompts; write `benchmark.json`.

    path, asked: route and request fields by which the server takes a prompt of token ids. chats: request fields of
    conversations that are asked, in turn, instead of random prompts.
    """
    options: Request = {"max_tokens": benchmark.output_tokens, "temperature": 0, "ignore_eos": True}
    options |= {"stream": True, "stream_options": {"include_usage": True}}

    turns = itertools.cycle(chats)

    def request(numbers: random.Random) -> Request:
        if chats:
            return {"model": client.model, **next(turns), **options}
        prompt = [numbers.randrange(vocabulary) for _ in range(benchmark.input_tokens)]
        return {"model": client.model, **asked(prompt), **options}

    results = [
        asyncio.run(_under_load(client, path, request, benchmark, concurrency))
        for concurrency in benchmark.concurrencies
    ]
    (folder / "benchmark.json").write_text(json.dumps([asdict(result) for result in results], indent=2))
    return results


async def _under_load(
    client: Client,
    path: str,
    request: Callable[[random.Random], Request],
    benchmark: BenchmarkConfig,
    concurrency: int,
) -> LoadResult:
    numbers = random.Random(SEED)  # noqa: S311 (no secret)
    count = benchmark.requests_per_concurrency * concurrency
    requests = [request(numbers) for _ in range(count + 1)]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    timings: list[Timing | None] = []
    async with aiohttp.ClientSession(headers=headers) as http:
        await _timed(http, client, path, requests.pop())  # a warm-up, not counted
        remaining = iter(requests)
        started_s = time.monotonic()

        async def ask() -> None:
            # All tasks take from one iterator, so that each begins its next request as soon as it is free.
            for waiting in remaining:
                timings.append(await _timed(http, client, path, waiting))

        await asyncio.gather(*(ask() for _ in range(concurrency)))
        elapsed_s = time.monotonic() - started_s
    good = [timing for timing in timings if timing]
    num_tokens = sum(timing.tokens for timing in good)
    return LoadResult(
        concurrency=concurrency,
        num_requests=count,
        num_failed=count - len(good),
        num_output_tokens=num_tokens,
        ttft_ms=_median_ms(timing.first_s for timing in good),
        # n tokens have n - 1 gaps.
        inter_token_latency_ms=_median_ms(
            (timing.total_s - timing.first_s) / max(1, timing.tokens - 1) for timing in good
        ),
        output_tokens_per_s=num_tokens / elapsed_s,
    )


async def _timed(http: aiohttp.ClientSession, client: Client, path: str, request: Request) -> Timing | None:
    """Send one benchmark request; returns its timing, or None if it failed."""
    started_s, first_s, used = time.monotonic(), None, 0
    expected = client.expected(path, answer_bytes(request), STREAM_TIMEOUT_S)
    try:
        url = client.url + path
        async with opened_aiohttp(http, expected, "POST", url, client.timeout_s, json=request) as answer:
            if answer.status != 200:
                return None
            events = EventReader(expected, answer.headers, ChatEvent)
            async for chunk in answer.content.iter_any():
                for event in events.add(chunk):
                    first_s = first_s or time.monotonic() - started_s
                    used = (event.usage and event.usage.completion_tokens) or used
            events.end()
    except (aiohttp.ClientError, TimeoutError, ServerError):
        return None
    return Timing(first_s, time.monotonic() - started_s, used) if first_s and used else None


def _median_ms(seconds: Iterator[float]) -> float:
    values = list(seconds)
    return statistics.median(values) * 1000 if values else 0.0
