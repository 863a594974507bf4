"""Prompts → completions, asked of a server many at a time.

Each is kept in a file as it arrives: what was asked before a kill is not asked again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from pydantic import ValidationError

from stages.core.errors import ServerError
from stages.core.strict import StrictModel
from stages.generate.config import GenerateConfig
from stages.hubs.retry import RetryBackoff, busy_from_status, busy_from_transport
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
    config: GenerateConfig,
    kept: Path,
    report: Callable[[int, int], None],
) -> list[Sample]:
    """`num_samples` completions of each prompt, given as token ids; in the order of the prompts.

    kept: file of those that were asked before. report(asked, all) is called after each.
    Raises ServerError for a request that is refused, TransientError when the server is gone for good.
    """
    found = {(one.prompt, one.sample): one for one in _read(kept)}
    jobs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(config.num_samples)]
    with kept.open("a", encoding="utf-8") as stream:

        def keep(sample: Sample) -> None:
            found[sample.prompt, sample.sample] = sample
            stream.write(sample.model_dump_json() + "\n")
            stream.flush()
            report(len(found), len(jobs))

        asyncio.run(_ask_all(client, prompts, config, [job for job in jobs if job not in found], keep))
    return [found[job] for job in jobs]


def seed_of(config: GenerateConfig, prompt: int, sample: int) -> int:
    """Of one completion: no two share one, and the same recipe has the same."""
    return int(np.random.SeedSequence((config.seed, prompt, sample)).generate_state(1)[0]) >> 1


async def _ask_all(
    client: Client,
    prompts: Sequence[list[int]],
    config: GenerateConfig,
    jobs: Iterable[Job],
    keep: Callable[[Sample], None],
) -> None:
    remaining = iter(jobs)
    concurrent = config.execution.concurrent_requests
    limits = httpx.Limits(max_connections=concurrent, max_keepalive_connections=concurrent)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=client.timeout_s, limits=limits) as http:

        async def work() -> None:
            for prompt, sample in remaining:
                request = _request(client.model, prompts[prompt], config, seed_of(config, prompt, sample))
                choice, num_tokens = await _answer(http, request)
                truncated = choice.get("finish_reason") == "length"
                keep(
                    Sample(
                        prompt=prompt,
                        sample=sample,
                        seed=request["seed"],
                        text=choice["text"],
                        num_tokens=num_tokens,
                        truncated=truncated,
                    )
                )

        workers = [asyncio.create_task(work()) for _ in range(concurrent)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()


def _request(model: str, prompt: list[int], config: GenerateConfig, seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "stop": list(config.stop) or None,
        "seed": seed,
    }


async def _answer(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The choice, and its tokens. A server that is busy, or does not answer, is asked again a few times."""
    backoff = RetryBackoff("asking for a completion")
    while True:
        try:
            response = await http.post("/v1/completions", json=request)
        except httpx.TransportError as error:
            busy = busy_from_transport(error)
        else:
            if response.is_success:
                answer = response.json()
                return answer["choices"][0], int(answer["usage"]["completion_tokens"])
            found = busy_from_status(response.status_code, response.headers)
            if found is None:
                raise ServerError(f"{http.base_url} answered {response.status_code}: {response.text[:500]!r}")
            busy = found
        await asyncio.to_thread(backoff.wait, busy)


def _read(kept: Path) -> Iterator[Sample]:
    """Those that were written whole: a kill may have torn the last line, which is taken out of the file."""
    if not kept.exists():
        return
    whole = kept.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    kept.write_bytes(whole)
    for line in whole.splitlines():
        try:
            yield Sample.model_validate(json.loads(line))
        except (ValueError, ValidationError):
            continue
