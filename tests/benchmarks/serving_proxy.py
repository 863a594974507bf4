"""What the proxy costs: `python tests/benchmarks/serving_proxy.py [MODEL_FOLDER]`.

The same streamed completions go to vLLM's Unix socket and through the proxy, in turns, at several concurrencies. Prints
tokens per second and the median time to the first token of both, and their ratios. Without a model, a random one that
is so small that the proxy is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stages.serving.backend import EngineAddress
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import Server, started_server

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving import SERVING, make_model

ROUNDS = 3
REQUESTS_PER_CONCURRENCY = 8
OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    ttft_s: float


async def load(address: EngineAddress, server: Server, concurrency: int) -> Measured:
    """So many streamed completions at a time."""
    body = {"model": server.spec.served_name, "prompt": "What is 12 + 34?", "max_tokens": OUTPUT_TOKENS}
    body |= {"ignore_eos": True, "temperature": 0, "stream": True}
    turns, first_tokens_s = asyncio.Semaphore(concurrency), []

    async def ask(session: aiohttp.ClientSession) -> None:
        async with turns:
            asked_s = time.perf_counter()
            async with session.post(address.url / "v1" / "completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.content.readany()
                first_tokens_s.append(time.perf_counter() - asked_s)
                async for _ in answer.content.iter_any():
                    pass

    headers = {"Authorization": f"Bearer {server.api_key}"}
    num_requests = concurrency * REQUESTS_PER_CONCURRENCY
    async with aiohttp.ClientSession(connector=address.connector(), headers=headers) as session:
        began_s = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(num_requests)))
        elapsed_s = time.perf_counter() - began_s
    return Measured(num_requests * OUTPUT_TOKENS / elapsed_s, statistics.median(first_tokens_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "model"
        if not arguments.model:
            make_model(model)
        spec = new_launch_spec(model, "model", ServingConfig.model_validate(SERVING))
        with started_server(spec, ServeExecution(), Path(folder) / "log", Path(folder) / "runtime") as server:
            server.wait_until_ready(600)
            proxied = EngineAddress(port=int(server.url.rpartition(":")[2]))
            asyncio.run(load(proxied, server, 8))  # to warm up
            for concurrency in arguments.concurrencies:
                compare(server, proxied, concurrency)


def compare(server: Server, proxied: EngineAddress, concurrency: int) -> None:
    """Measure both in turns and print a line."""
    results: dict[str, list[Measured]] = {"direct": [], "proxy": []}
    for _ in range(ROUNDS):
        results["direct"].append(asyncio.run(load(server.address, server, concurrency)))
        results["proxy"].append(asyncio.run(load(proxied, server, concurrency)))
    best = {name: max(rounds, key=lambda one: one.tokens_per_s) for name, rounds in results.items()}
    direct, proxy = best["direct"], best["proxy"]
    print(
        f"{concurrency:4} at a time: {direct.tokens_per_s:8.0f} tokens/s direct, {proxy.tokens_per_s:8.0f} through the "
        f"proxy ({proxy.tokens_per_s / direct.tokens_per_s:.2f}); first token {direct.ttft_s * 1000:6.1f} and "
        f"{proxy.ttft_s * 1000:6.1f} ms"
    )


if __name__ == "__main__":
    main()
