"""Requests of a killed engine wait for the next engine, within limits of time, bytes and attempts."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from stages.serving import waiting
from stages.serving.backend import Backend, EngineAddress
from stages.serving.proxy import Proxy, listening
from stages.serving.server import listening_socket
from stages.serving.tally import ServedVersion
from stages.serving.waiting import RequestQueue
from tests.slurm_cluster import free_ports
from tests.tiny_engine import PROGRAM

KEY = "key"
CHAT = "/v1/chat/completions"
PATIENCE_S = 300.0


class Engines:
    """Starter of tiny engines behind one proxy, each in its predecessor's place. model: folder of the next."""

    def __init__(self, model, stack: ExitStack):
        self.model = model
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = stack
        self.proxy = Proxy(self.started(), KEY, waiting=RequestQueue())

    def started(self, port: int | None = None) -> Backend:
        """Start the next engine; return its address once it listens (the former's port is used at once)."""
        port = port or free_ports(1)[0]
        command = [sys.executable, str(PROGRAM), str(self.model), "adder", "127.0.0.1", str(port)]
        process = self._stack.enter_context(subprocess.Popen(command, env={**os.environ, "TINY_KEY": KEY}))
        self._processes.append(process)
        self._stack.callback(process.kill)
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return Backend(EngineAddress(port=port), version=ServedVersion("adder", str(len(self._processes))))
            time.sleep(0.01)
        raise AssertionError("Tiny did not start")

    def kill(self) -> None:
        self._processes[-1].kill()
        self._processes[-1].wait()

    async def died(self) -> None:
        await asyncio.to_thread(self._processes[-1].wait)

    async def next(self) -> None:
        """Start another engine, and switch the proxy to it."""
        self.proxy.switch(await asyncio.to_thread(self.started))


@asynccontextmanager
async def client_of(engines: Engines) -> AsyncIterator[httpx.AsyncClient]:
    with ExitStack() as stack:
        public = stack.enter_context(listening_socket("127.0.0.1", None))
        stack.enter_context(listening(engines.proxy, public))
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{public.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            yield client


@pytest.fixture
def trial(tmp_path) -> Callable[[Callable[[Engines, httpx.AsyncClient], Awaitable[None]]], None]:
    async def run(tried) -> None:
        with ExitStack() as stack:
            engines = Engines(tmp_path, stack)
            async with client_of(engines) as client:
                await asyncio.wait_for(tried(engines, client), PATIENCE_S)

    return lambda tried: asyncio.run(run(tried))


def question(number: int, **more: object) -> dict:
    return {"model": "adder", "messages": [{"role": "user", "content": f"{number} + 1"}], **more}


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Send an addition question, streamed if `number` is odd, and return the model version that answered."""
    is_stream = bool(number % 2)
    answer = await client.post(CHAT, json=question(number, stream=is_stream))
    assert answer.status_code == 200, answer.text
    if is_stream:
        assert str(number + 1) in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["message"]["content"] == str(number + 1)
    return answer.headers["x-lifecycle-version"]


async def under_way(proxy: Proxy, count: int) -> None:
    """Wait until the proxy has `count` requests running on its present engine."""
    while proxy._backend.num_requests < count:
        await asyncio.sleep(0.01)


async def waiting_bytes(proxy: Proxy, least: int, most: int) -> None:
    while not least <= proxy._waiting.num_bytes <= most:
        await asyncio.sleep(0.01)


def test_what_two_killed_engines_had_is_answered_by_the_third(trial, tmp_path):
    async def tried(engines, client):
        (tmp_path / "slow").write_text("600")
        had = [asyncio.create_task(ask(client, number)) for number in range(8)]
        await under_way(engines.proxy, 8)
        engines.kill()
        late = [asyncio.create_task(ask(client, number)) for number in range(8, 16)]
        await engines.next()
        await under_way(engines.proxy, 16)
        engines.kill()
        (tmp_path / "slow").unlink()
        await engines.next()
        assert await asyncio.gather(*had, *late) == ["3"] * 16
        assert engines.proxy._waiting.num_bytes == 0

    trial(tried)


def test_what_an_engine_had_is_answered_by_the_next_at_the_same_address(trial, tmp_path):
    async def tried(engines, client):
        (tmp_path / "slow").write_text("600")
        had = [asyncio.create_task(ask(client, number)) for number in range(4)]
        await under_way(engines.proxy, 4)
        engines.kill()
        await waiting_bytes(engines.proxy, 1, 1000)
        (tmp_path / "slow").unlink()
        await asyncio.to_thread(engines.started, engines.proxy._backend.address.port)
        assert await asyncio.gather(*had) == ["1"] * 4

    trial(tried)


def test_an_answer_that_had_begun_is_cut_off(trial, tmp_path):
    async def tried(engines, client):
        (tmp_path / "slow").write_text("0.5")
        in_parts = {"messages": [{"role": "user", "content": "1 + 1 in red by"}], "temperature": 1, "top_p": 1}
        with pytest.raises(httpx.TransportError):
            async with client.stream("POST", CHAT, json=question(1, stream=True, **in_parts)) as answer:
                async for _ in answer.aiter_text():
                    (tmp_path / "slow").write_text("600")  # one of the next four parts does not come before the kill
                    engines.kill()

    trial(tried)


def test_who_waits_too_long_is_told_when_to_come_again(trial, monkeypatch):
    async def tried(engines, client):
        monkeypatch.setattr(waiting, "MAX_WAIT_S", 0.3)
        engines.kill()
        answer = await client.post(CHAT, json=question(1))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert "has not answered for 0.3 s" in answer.text

    trial(tried)


def test_bodies_that_wait_are_bounded_and_who_goes_away_leaves_room(trial, monkeypatch):
    async def tried(engines, client):
        monkeypatch.setattr(waiting, "MAX_WAITING_BYTES", 2500)
        engines.kill()
        first, second = (asyncio.create_task(client.post(CHAT, json=question(1, user="x" * 1000))) for _ in range(2))
        await waiting_bytes(engines.proxy, 2000, 2500)
        refused = await client.post(CHAT, json=question(1, user="x" * 1000))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        first.cancel()
        await waiting_bytes(engines.proxy, 1000, 1500)
        third = asyncio.create_task(client.post(CHAT, json=question(1, user="x" * 1000)))
        await waiting_bytes(engines.proxy, 2000, 2500)
        await engines.next()
        assert [answer.status_code for answer in await asyncio.gather(second, third)] == [200, 200]

    trial(tried)


def test_health_does_not_wait(trial):
    async def tried(engines, client):
        assert (await client.get("/health")).status_code == 200
        engines.kill()
        answer = await client.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")

    trial(tried)


def test_a_request_that_engines_die_of_is_not_asked_for_ever(trial, tmp_path):
    async def tried(engines, client):
        (tmp_path / "deadly").touch()
        deadly = asyncio.create_task(client.post(CHAT, json=question(1)))
        for _ in range(waiting.MAX_ENGINES - 1):
            await engines.died()
            await engines.next()
        answer = await deadly
        assert answer.status_code == 502
        assert "3 engines ended while they had this request" in answer.text

    trial(tried)


def test_an_engine_that_is_known_to_be_gone_is_not_asked_though_another_listens_there(trial):
    async def tried(engines, client):
        gone = engines.proxy._backend
        gone.is_gone = True
        asked = asyncio.create_task(ask(client, 2))
        await waiting_bytes(engines.proxy, 1, 1000)
        assert gone.num_requests == 0
        await engines.next()
        assert await asked == "2"

    trial(tried)
