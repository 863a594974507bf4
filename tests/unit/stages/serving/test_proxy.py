"""The proxy: what it passes on, and that an exchange of backends neither cuts nor misplaces a request."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stages.serving.proxy import Backend, Proxy

PATIENCE_S = 30.0


class Model:
    """A backend: `/echo` tells what arrived, `/stream` answers in two parts, the second when it is told to."""

    def __init__(self, name: str):
        self.name = name
        self.go_on = asyncio.Event()
        routes = [Route("/echo", self.echo, methods=["GET", "POST"]), Route("/stream", self.stream)]
        self.application = Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        body = (await request.body()).decode()
        told = {"name": self.name, "query": request.url.query, "body": body, "key": request.headers["authorization"]}
        return JSONResponse(told, status_code=418, headers={"x-model": self.name})

    async def stream(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield f"{self.name} begins".encode()
            await self.go_on.wait()
            yield f", {self.name} ends".encode()

        return StreamingResponse(parts())


@asynccontextmanager
async def listening(application: object) -> AsyncIterator[str]:
    """The address of an ASGI application on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="error"))
        served = asyncio.create_task(server.serve(sockets=[free]))
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            server.should_exit = True
            await served


Trial = Callable[[Model, Model, Backend, Backend, Proxy, httpx.AsyncClient], Awaitable[None]]


def in_front_of_two(trial: Trial) -> None:
    """Run a trial with a client of a proxy in front of `old`; `new` waits for its turn."""

    async def run() -> None:
        old, new = Model("old"), Model("new")
        async with listening(old.application) as old_url, listening(new.application) as new_url:
            behind, next_behind = Backend(old_url), Backend(new_url)
            proxy = Proxy(behind)
            headers = {"authorization": "Bearer key"}
            async with listening(proxy) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
                await asyncio.wait_for(trial(old, new, behind, next_behind, proxy, client), PATIENCE_S)

    asyncio.run(run())


def test_requests_and_answers_pass_unchanged():
    async def trial(old, new, behind, next_behind, proxy, client):
        answer = await client.post("/echo?a=1&b=%2F", content="question")
        assert answer.status_code == 418
        assert answer.headers["x-model"] == "old"
        assert answer.json() == {"name": "old", "query": "a=1&b=%2F", "body": "question", "key": "Bearer key"}

    in_front_of_two(trial)


def test_a_stream_arrives_as_it_is_made_and_stays_with_its_backend_while_others_go_to_the_next():
    async def trial(old, new, behind, next_behind, proxy, client):
        async with client.stream("GET", "/stream") as answer:
            parts = answer.aiter_text()
            assert await anext(parts) == "old begins"
            assert proxy.switch(next_behind) is behind
            drained = asyncio.create_task(behind.drained())
            assert (await client.get("/echo")).json()["name"] == "new"
            assert not drained.done()
            old.go_on.set()
            assert await anext(parts) == ", old ends"
        await drained

    in_front_of_two(trial)


def test_a_client_that_goes_away_leaves_nothing_to_wait_for():
    async def trial(old, new, behind, next_behind, proxy, client):
        async with client.stream("GET", "/stream") as answer:
            await anext(answer.aiter_text())
        old.go_on.set()
        await behind.drained()

    in_front_of_two(trial)


def test_a_backend_that_is_away_is_told_of():
    async def trial(old, new, behind, next_behind, proxy, client):
        proxy.switch(Backend("http://127.0.0.1:9"))
        answer = await client.get("/echo")
        assert answer.status_code == 502
        assert "does not answer" in answer.json()["error"]["message"]

    in_front_of_two(trial)


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_refusals_are_the_backends(method):
    async def trial(old, new, behind, next_behind, proxy, client):
        assert (await client.request(method, "/echo")).status_code == 405

    in_front_of_two(trial)
