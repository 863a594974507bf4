"""Benchmark of the serving proxy: requests/s and latency with and without it.

Run: `python tests/benchmarks/serving_proxy.py [--model FOLDER | --engine-of-events]`.
The same streamed completions go to vLLM's Unix socket and through the proxy, in turns, at several concurrencies, from
a process of their own. Prints the medians of both: requests per second, time to the first token, and the processor's
time of the proxy's thread. The model is random and so small that the proxy's cost dominates. An engine of events writes
one to every stream at a fixed pace: it costs almost nothing, so the rest is the proxy's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.serving.backend import Backend, EngineAddress
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.proxy import Proxy, listening
from stages.serving.registry import new_launch_spec
from stages.serving.server import listening_socket, started_server
from stages.serving.tally import ServedVersion

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving import SERVING, make_model

SPAWN = multiprocessing.get_context("spawn")
OUTPUT_TOKENS = 24
STEP_S = 0.01
KEY = "key"
END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True)
class Measured:
    """Measurements of one proxy round: requests/s, latency to the first token, and the proxy's CPU time per request."""

    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    processor_ms: float = 0.0


def request_bytes(key: str, model: str) -> bytes:
    """Return the HTTP request that the benchmark sends, a streamed chat completion, as bytes."""
    asked = {"model": model, "messages": [{"role": "user", "content": "What is 12 + 34?"}], "stream": True}
    body = json.dumps({**asked, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: engine", f"Authorization: Bearer {key}"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(head).encode() + body


def under_load(address: EngineAddress, request: bytes, concurrency: int, num_requests: int) -> Measured:
    """Send requests over a fixed number of reused connections, and measure requests/s and time to the first token."""
    first_tokens_ms: list[float] = []
    remaining = iter(range(num_requests))

    async def ask_in_turn() -> None:
        if address.socket:
            reader, writer = await asyncio.open_unix_connection(str(address.socket))
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
        for _ in remaining:
            began_s = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            answer = await reader.read(65536)
            first_tokens_ms.append((time.perf_counter() - began_s) * 1000)
            while not answer.endswith(END_OF_CHUNKS):
                part = await reader.read(65536)
                assert part, answer
                answer += part
            assert b"data: [DONE]" in answer, answer
        writer.close()

    async def ask() -> float:
        began_s = time.perf_counter()
        await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
        return time.perf_counter() - began_s

    elapsed_s = asyncio.run(ask())
    quantiles = statistics.quantiles(first_tokens_ms, n=100)
    return Measured(num_requests / elapsed_s, quantiles[49], quantiles[98])


class EventStreams(asyncio.Protocol):
    """Stand-in for vLLM in the proxy benchmark: all clients get tokens at the same pace, with hardly any CPU time."""

    under_way: dict[EventStreams, int] = {}  # noqa: RUF012 (of the process)

    def connection_made(self, transport: Any) -> None:
        self.transport, self.held = transport, b""

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, found, body = self.held.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) if found else 0
        if not found or len(body) < length:
            return
        self.held = body[length:]
        head = [b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream; charset=utf-8", b"Transfer-Encoding: chunked"]
        self.transport.write(b"\r\n".join([*head, b"", b""]))
        self.usage = b'"include_usage":' in body.replace(b" ", b"")
        self.under_way[self] = 0

    def step(self) -> None:
        number = self.under_way[self] = self.under_way[self] + 1
        choice = {"index": 0, "delta": {"content": " a"}, "logprobs": None, "finish_reason": None, "token_ids": None}
        common = {"id": f"chatcmpl-{id(self):032x}", "object": "chat.completion.chunk", "created": 1, "model": "model"}
        if number < OUTPUT_TOKENS:
            self.write({**common, "choices": [choice]})
            return
        self.write({**common, "choices": [{**choice, "finish_reason": "length"}]})
        if self.usage:
            self.write({**common, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": OUTPUT_TOKENS}})
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n" + END_OF_CHUNKS)
        del self.under_way[self]

    def write(self, content: dict[str, Any]) -> None:
        event = f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    def connection_lost(self, error: Exception | None) -> None:
        self.under_way.pop(self, None)


def engine_of_events(path: Path) -> None:
    """Run the stand-in for vLLM on a Unix socket; to be called in a process of its own."""

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(EventStreams, str(path), backlog=1024)
        while True:
            await asyncio.sleep(STEP_S)
            for stream in [*EventStreams.under_way]:
                stream.step()

    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


@contextmanager
def events_engine(folder: Path) -> Iterator[tuple[EngineAddress, EngineAddress, bytes]]:
    """Start the stand-in for vLLM and a proxy in front of it; yield both addresses and the bytes of a request."""
    behind = EngineAddress(socket=folder / "engine.sock")
    process = SPAWN.Process(target=engine_of_events, args=(behind.socket,))
    process.start()
    try:
        while not behind.socket.exists():
            time.sleep(0.01)
        proxy = Proxy(Backend(behind, version=ServedVersion("model", "1")), KEY)
        with listening_socket("127.0.0.1", None) as public, listening(proxy, public):
            yield behind, EngineAddress(port=public.getsockname()[1]), request_bytes(KEY, "model")
    finally:
        process.terminate()
        process.join()


@contextmanager
def vllm(folder: Path, model: Path | None) -> Iterator[tuple[EngineAddress, EngineAddress, bytes]]:
    """Start a real vLLM and a proxy in front of it; yield both addresses and the bytes of a request."""
    if not model:
        make_model(model := folder / "model")
    spec = new_launch_spec(model, "model", ServingConfig.model_validate({**SERVING, "max_model_len": 128}))
    with started_server(spec, ServeExecution(), folder / "log", folder / "runtime", version="1") as server:
        server.wait_until_ready(600)
        behind = EngineAddress(socket=folder / "runtime" / "engine.sock")
        proxied = EngineAddress(port=int(server.url.rpartition(":")[2]))
        yield behind, proxied, request_bytes(server.api_key, "model")


def processor_s() -> float:
    """Return the CPU seconds that the thread of the serving proxy has used so far."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "proxy")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine-of-events", action="store_true")
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-concurrency", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, SPAWN) as pool:
        engine = events_engine(Path(folder)) if arguments.engine_of_events else vllm(Path(folder), arguments.model)
        with engine as (behind, proxied, request):
            pool.submit(under_load, proxied, request, 8, 64).result()  # to warm up
            for concurrency in arguments.concurrencies:
                results: dict[str, list[Measured]] = {"direct": [], "proxy": []}
                num_requests = concurrency * arguments.requests_per_concurrency
                for _ in range(arguments.rounds):
                    for name, address in (("direct", behind), ("proxy", proxied)):
                        before_s = processor_s()
                        measured = pool.submit(under_load, address, request, concurrency, num_requests).result()
                        used_ms = (processor_s() - before_s) * 1000 / num_requests
                        results[name].append(Measured(**{**vars(measured), "processor_ms": used_ms}))
                print(line(concurrency, results), flush=True)


def line(concurrency: int, results: dict[str, list[Measured]]) -> str:
    """Return a line of the results: median requests/s and latency, directly and through the proxy."""
    rate, p50, p99, used = (
        [statistics.median(getattr(one, name) for one in results[way]) for way in ("direct", "proxy")]
        for name in ("requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "processor_ms")
    )
    return (
        f"{concurrency:4} at a time: {rate[0]:5.0f} requests/s direct, {rate[1]:5.0f} through the proxy "
        f"({rate[1] / rate[0]:.2f}); first token p50 {p50[0]:4.0f} and {p50[1]:4.0f} ms ({p50[1] / p50[0]:.2f}), "
        f"p99 {p99[0]:4.0f} and {p99[1]:4.0f} ms ({p99[1] / p99[0]:.2f}); {used[1]:.2f} ms of the processor a request"
    )


if __name__ == "__main__":
    main()
