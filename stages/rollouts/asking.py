"""Requests for completions, asked of a server many at a time.

By aiohttp: on the cores that a server on a CPU needs, a request costs a tenth of what httpx takes for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import aiohttp

from stages.core.errors import TransientError
from stages.remote.http import RetryBackoff, busy_from_status, busy_from_transport
from stages.remote.http_answers import Expected, ask_aiohttp
from stages.serving.client import COMPLETIONS, Choice, Choices, Client, answer_bytes

Request = dict[str, Any]
"""Of `/v1/completions`."""
Answer = Choices[Choice]
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
    headers = {"Authorization": f"Bearer {client.api_key}"}
    connections = aiohttp.TCPConnector(limit=concurrent)
    async with aiohttp.ClientSession(headers=headers, connector=connections) as http:

        async def work() -> None:
            nonlocal num_answers
            for job, request in remaining:
                expected = client.expected(COMPLETIONS, answer_bytes(request))
                keep(job, request, await _answer(http, expected, client.url + COMPLETIONS, request))
                num_answers += 1

        workers = [asyncio.create_task(work()) for _ in range(concurrent)]
        running = set(workers)
        try:
            while running:
                before = num_answers
                ended, running = await asyncio.wait(workers, timeout=stall_s, return_when=asyncio.FIRST_EXCEPTION)
                for worker in ended:
                    worker.result()
                if running and num_answers == before:
                    raise TransientError(f"{client.url} gave no answer for {stall_s:g} s")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _answer(http: aiohttp.ClientSession, expected: Expected, url: str, request: Request) -> Answer:
    """Ask once, and again a few times while the server is busy or does not answer."""
    backoff = RetryBackoff("asking for a completion")
    while True:
        try:
            answer = await ask_aiohttp(http, expected, "POST", url, json=request)
            busy = busy_from_status(answer.status, answer.headers)
            if busy is None:
                return answer.parsed(Choices[Choice])
        except (aiohttp.ClientError, OSError) as error:
            busy = busy_from_transport(error)
        await asyncio.to_thread(backoff.wait, busy)
