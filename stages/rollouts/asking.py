"""Requests for completions, asked of a server many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import httpx

from stages.core.errors import ServerError, TransientError
from stages.hubs.retry import RetryBackoff, busy_from_status, busy_from_transport
from stages.serving.client import Client

Request = dict[str, Any]
"""Of `/v1/completions`."""
Answer = dict[str, Any]
Job = TypeVar("Job")


def ask_all(
    client: Client,
    requests: Iterable[tuple[Job, Request]],
    concurrent: int,
    keep: Callable[[Job, Request, Answer], None],
    stall_s: float | None = None,
) -> None:
    """`keep` is called with each answer as it arrives; which request it answers, its caller calls a job.

    Raises ServerError for a request that is refused, TransientError when the server is gone for good, or gives no
    answer at all for `stall_s` seconds.
    """
    asyncio.run(_ask_all(client, requests, concurrent, keep, stall_s))


async def _ask_all(
    client: Client,
    requests: Iterable[tuple[Job, Request]],
    concurrent: int,
    keep: Callable[[Job, Request, Answer], None],
    stall_s: float | None,
) -> None:
    remaining = iter(requests)
    num_answers = 0
    limits = httpx.Limits(max_connections=concurrent, max_keepalive_connections=concurrent)
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=client.timeout_s, limits=limits) as http:

        async def work() -> None:
            nonlocal num_answers
            for job, request in remaining:
                keep(job, request, await _answer(http, request))
                num_answers += 1

        workers = [asyncio.create_task(work()) for _ in range(concurrent)]
        done = asyncio.gather(*workers)
        try:
            while not done.done():
                before = num_answers
                await asyncio.wait([done], timeout=stall_s)
                if num_answers == before and not done.done():
                    raise TransientError(f"{client.url} gave no answer for {stall_s:g} s")
            await done
        finally:
            for worker in workers:
                worker.cancel()


async def _answer(http: httpx.AsyncClient, request: Request) -> Answer:
    """A server that is busy, or does not answer, is asked again a few times."""
    backoff = RetryBackoff("asking for a completion")
    while True:
        try:
            response = await http.post("/v1/completions", json=request)
        except httpx.TransportError as error:
            busy = busy_from_transport(error)
        else:
            if response.is_success:
                answer: Answer = response.json()
                return answer
            found = busy_from_status(response.status_code, response.headers)
            if found is None:
                raise ServerError(f"{http.base_url} answered {response.status_code}: {response.text[:500]!r}")
            busy = found
        await asyncio.to_thread(backoff.wait, busy)
