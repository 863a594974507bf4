"""The proxy before an engine forwards, refuses and limits requests, and switches engines without losing one."""

import asyncio
import io
import itertools
import json
import resource
import socket
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stages.data.media.images import as_data_address, decode_picture, from_data_address
from stages.models.media import HeardSound
from stages.serving import proxy as listening_module
from stages.serving import proxy as proxy_module
from stages.serving.backend import Backend, EngineAddress, Naming
from stages.serving.pictures import Limits
from stages.serving.proxy import CHAT, MAX_BODY_BYTES, ROUTES, Proxy, listening
from stages.serving.tally import ServedVersion
from tests.unit.stages.data.media.odd_pictures import odd_pictures

PATIENCE_S = 30.0
KEY = "key"
COMPLETIONS = "/v1/completions"


class Model:
    """Fake engine behind the proxy, with an ASGI application that answers as a test needs.

    `/v1/completions` returns the request. Chats are answered in two parts, the second on demand; `/metrics` without
    end; every other path by `secret`.
    """

    def __init__(self, name: str):
        self.name = name
        self.go_on = asyncio.Event()
        self.left_alone = asyncio.Event()
        self.num_asked = 0
        self.num_parts = 0
        self.bodies: list[bytes] = []
        routes = [
            Route(COMPLETIONS, self.echo, methods=["GET", "POST"]),
            Route("/v1/chat/completions", self.stream, methods=["POST"]),
            Route("/metrics", self.flood),
            Route("/v1/models", self.models),
            Route("/{path:path}", self.secret, methods=["GET", "POST", "OPTIONS"]),
        ]
        self.application = Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        self.num_asked += 1
        body = (await request.body()).decode()
        arrived = {"name": self.name, "query": request.url.query, "body": body, "key": request.headers["authorization"]}
        arrived["origin"] = request.headers.get("origin")
        return JSONResponse(arrived, status_code=418, headers={"x-model": self.name})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in ("base", "adder@1", "adder@2")]})

    async def secret(self, request: Request) -> Response:
        self.num_asked += 1
        return Response("secret")

    async def flood(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            while True:
                self.num_parts += 1
                yield b"%08x" % self.num_parts * 2**13
                await asyncio.sleep(0)  # once no one reads, sending waits for nothing

        self.num_asked += 1
        return StreamingResponse(parts())

    async def stream(self, request: Request) -> Response:
        self.bodies.append(await request.body())

        async def parts() -> AsyncIterator[bytes]:
            try:
                yield f"{self.name} begins".encode()
                await self.go_on.wait()
                yield f", {self.name} ends".encode()
            except asyncio.CancelledError:
                self.left_alone.set()
                raise

        return StreamingResponse(parts())


@asynccontextmanager
async def engine_on(path: Path, model: Model) -> AsyncIterator[EngineAddress]:
    """Run a fake engine on a Unix socket, and provide its address."""
    with socket.socket(socket.AF_UNIX) as inside:
        inside.bind(str(path))
        server = uvicorn.Server(uvicorn.Config(model.application, lifespan="off", log_level="error"))
        served = asyncio.create_task(server.serve(sockets=[inside]))
        try:
            yield EngineAddress(socket=path)
        finally:
            model.go_on.set()
            served.cancel()  # it looks a few times a second only whether it is to end
            with suppress(asyncio.CancelledError):
                await served
            server.servers[0].close()


Trial = Callable[[Model, Model, EngineAddress, Proxy, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def in_front_of_two(tmp_path) -> Callable[[Trial], None]:
    """Provide a function that runs a trial with the engine `old` behind a proxy, and the engine `new` to replace it."""

    async def run(trial: Trial) -> None:
        old, new = Model("old"), Model("new")
        async with engine_on(tmp_path / "old", old) as behind, engine_on(tmp_path / "new", new) as next_behind:
            proxy = Proxy(Backend(behind), KEY)
            public = socket.socket()
            public.bind(("127.0.0.1", 0))
            headers = {"authorization": f"Bearer {KEY}"}
            url = f"http://127.0.0.1:{public.getsockname()[1]}"
            with ExitStack() as stack:
                stack.enter_context(listening(proxy, public))
                async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
                    await asyncio.wait_for(trial(old, new, next_behind, proxy, client), PATIENCE_S)

    return lambda trial: asyncio.run(run(trial))


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization Bearer SECRET",
        b"Authorization : Bearer SECRET",
        b"Authorization: Bearer SECRET\0",
        b" Authorization: Bearer SECRET",
        b"Authorization: Bearer SECRET" + b"x" * 10_000,
        b"Content-Length: SECRET",
        b"Authorization: Bearer SECRET\r\nTransfer-Encoding: chunked\r\n\r\nSECRET",
    ],
)
def test_a_malformed_line_is_refused_and_its_key_stays_out_of_the_log(
    line: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level("DEBUG")
    public = socket.create_server(("127.0.0.1", 0))
    address = public.getsockname()
    with (
        listening(Proxy(Backend(EngineAddress(port=9)), "SECRET"), public),
        socket.create_connection(address) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.0 400 ")
    assert "SECRET" not in answer.decode() + caplog.text + "".join(capfd.readouterr())


def chat(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]}


def at(address: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": address}}


ODD = odd_pictures()
PNG = as_data_address(ODD["one pixel"])
REFUSED = {
    "http": (at("http://127.0.0.1/a.png"), "nothing is fetched here"),
    "https": (at("https://example.org/a.png"), "nothing is fetched here"),
    "file": (at("file:///etc/hostname"), "nothing is fetched here"),
    "data in capitals": (at(PNG.replace("data", "DATA")), "nothing is fetched here"),
    "no picture": (at("data:text/html;base64,aGk="), "nothing is fetched here"),
    "no address": (at(None), "picture 1 is without an address"),
    "no type": ({"image_url": "https://example.org/a.png"}, "is no text and no medium"),
    "text with a picture": ({"type": "text", "text": "", "uuid": "1", "image_url": "file:///x"}, "is no text and"),
    "video": ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "a part of type 'video_url'"),
    "tensors": ({"type": "image_embeds", "image_embeds": "UEs="}, "a part of type 'image_embeds'"),
    "no base64": (at("data:image/png,abc"), "is a `data:` address without base64"),
    "damaged base64": (at("data:image/png;base64,%%"), "picture 1 is not base64"),
    **{
        name: (at(f"data:image/png;base64,{b64encode(ODD[name]).decode()}"), message)
        for name, message in {
            "svg": "is no picture that can be opened",
            "animated": "has several frames",
            "strip": "sides of at most 100 to 1",
            "claims 30000 × 30000": "claims more than 33,554,432 pixels",
        }.items()
    },
}


def test_pictures_reach_the_engine_only_inside_of_requests_and_bounded(in_front_of_two):
    """The proxy refuses all others in any encoding, and the engine decodes a picture as the trainer does."""

    async def trial(old: Model, new: Model, _: EngineAddress, proxy: Proxy, client: httpx.AsyncClient) -> None:
        old.go_on.set()

        async def refusal(body: bytes) -> str:
            answer = await client.post(CHAT, content=body)
            return answer.json()["error"]["message"] if answer.status_code == 400 else f"status {answer.status_code}"

        deep, allowed = ODD["16 bits"], [chat(at(PNG), at(PNG)), chat()]
        for limit in (0, 2):
            proxy.switch(backend := Backend(proxy._backend.address, limits=Limits(limit)))
            for name, (part, message) in REFUSED.items():
                found = await refusal(json.dumps(chat(part)).encode())
                if limit or part.get("type") != "image_url":
                    assert message in found, name
                else:
                    assert "reads text alone" in found
            escaped = json.dumps(chat(at("https://example.org"))).replace("image_url", "\\u0069mage_url")
            assert await refusal(escaped.encode())
            assert "in UTF-8" in await refusal(escaped.encode("utf-16"))
            assert "in UTF-8" in await refusal(json.dumps({**chat(at("http://x")), "n": float("nan")}).encode())
        assert "more than 2 pictures" in await refusal(json.dumps(chat(*[at(PNG)] * 3)).encode())
        assert not old.bodies
        for request in allowed:
            assert (await client.post(CHAT, json=request)).status_code == 200
        assert [json.loads(body) for body in old.bodies] == allowed
        await client.post(CHAT, json=chat(at(f"data:image/png;base64,{b64encode(deep).decode()}")))
        sent = json.loads(old.bodies[-1])["messages"][0]["content"][1]["image_url"]["url"]
        with Image.open(io.BytesIO(from_data_address(sent))) as image:
            assert image.mode == "RGB"
            assert image.tobytes() == decode_picture(deep).tobytes()
        backend.limits = Limits()
        large = b"x" * (MAX_BODY_BYTES + 1)
        assert (await client.post(CHAT, content=large)).status_code == 413
        backend.limits = Limits(1)
        assert (await client.post(CHAT, content=large)).status_code == 200

    in_front_of_two(trial)


def test_a_decoder_that_is_not_installed_is_an_error_of_the_server_that_says_so(in_front_of_two, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)

    async def trial(old: Model, new: Model, _: EngineAddress, proxy: Proxy, client: httpx.AsyncClient) -> None:
        proxy.switch(Backend(proxy._backend.address, limits=Limits(1, {"audio": HeardSound(16_000, 30)})))
        answer = await client.post(CHAT, json=chat({"type": "input_audio", "input_audio": {"data": "AAAA"}}))
        assert answer.status_code == 500 and "run `make media`" in answer.json()["error"]["message"] and not old.bodies

    in_front_of_two(trial)


@pytest.mark.parametrize("depth", [150, 250, 982, 5000])
def test_a_nesting_is_no_error_of_the_server(tmp_path, depth):
    """Nested JSON that only vLLM can parse is forwarded, or refused as the client's error.

    The proxy parses a request only to rename its model.
    """
    nested = b'{"model": "adder", "prompt": ' + b"[" * depth + b"]" * depth + b"}"

    async def ask(naming: Naming | None) -> tuple[int, object]:
        async with engine_on(tmp_path / "engine", Model("old")) as behind:
            public = socket.create_server(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{public.getsockname()[1]}"
            with listening(Proxy(Backend(behind, naming, ServedVersion("adder", "1")), KEY), public):
                headers = {"authorization": f"Bearer {KEY}"}
                async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
                    answer = await client.post(COMPLETIONS, content=nested)
                    return answer.status_code, answer.json()

    for naming, refused in ((None, False), (Naming("adder", "adder"), depth > 199)):
        (tmp_path / "engine").unlink(missing_ok=True)
        status, content = asyncio.run(ask(naming))
        assert status == (404 if refused else 418), content


def test_requests_and_answers_pass_unchanged(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        answer = await client.post(f"{COMPLETIONS}?a=1&b=%2F", content="question", headers={"origin": "http://evil"})
        assert answer.status_code == 418
        assert answer.headers["x-model"] == "old"
        arrived = {"name": "old", "query": "a=1&b=%2F", "body": "question", "key": "Bearer key", "origin": None}
        assert answer.json() == arrived

    in_front_of_two(trial)


def test_a_stream_arrives_as_it_is_made_and_stays_with_its_engine_while_others_go_to_the_next(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        async with client.stream("POST", "/v1/chat/completions") as answer:
            parts = answer.aiter_text()
            assert await anext(parts) == "old begins"
            before = proxy.switch(Backend(next_behind))
            assert (await client.post(COMPLETIONS)).json()["name"] == "new"
            assert not before.idle.is_set()
            old.go_on.set()
            assert await anext(parts) == ", old ends"
        await eventually(before.idle.is_set)

    in_front_of_two(trial)


def test_one_model_of_an_engine_is_asked_by_its_public_name_and_no_other_is(in_front_of_two):
    """The proxy takes a model's public name only, and can switch it to another adapter; running streams go on."""

    async def trial(old, new, next_behind, proxy, client):
        async def asked(**body):
            return await client.post(COMPLETIONS, json=body)

        proxy.switch(Backend(next_behind, Naming("adder", "adder@1")))
        arrived = (await asked(model="adder", prompt="é" * 1000)).json()
        assert json.loads(arrived["body"]) == {"model": "adder@1", "prompt": "é" * 1000}
        async with client.stream("POST", "/v1/chat/completions", json={"model": "adder"}) as answer:
            parts = answer.aiter_text()
            assert await anext(parts) == "new begins"
            before = proxy.switch(Backend(next_behind, Naming("adder", "adder@2")))
            assert json.loads((await asked(model="adder")).json()["body"]) == {"model": "adder@2"}
            assert not before.idle.is_set()
            new.go_on.set()
            assert await anext(parts) == ", new ends"
        await eventually(before.idle.is_set)

        num_asked = new.num_asked
        for body in ({"model": "adder@1"}, {"model": "base"}, {"prompt": "x"}, ["adder"]):
            answer = await client.post(COMPLETIONS, json=body)
            assert (answer.status_code, "the model adder" in answer.text) == (404, True)
        for body in ("no JSON", "[" * 100_000):
            assert (await client.post(COMPLETIONS, content=body)).status_code == 404
        assert new.num_asked == num_asked
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["adder"]

    in_front_of_two(trial)


def test_a_client_that_goes_away_leaves_nothing_to_wait_for_and_the_engine_hears_of_it(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        async with client.stream("POST", "/v1/chat/completions") as answer:
            await anext(answer.aiter_text())
        await old.left_alone.wait()
        await eventually(proxy.switch(Backend(next_behind)).idle.is_set)

    in_front_of_two(trial)


def test_an_engine_that_is_away_is_told_of(in_front_of_two, tmp_path):
    async def trial(old, new, next_behind, proxy, client):
        for address in (EngineAddress(port=9), EngineAddress(socket=tmp_path / "nobody")):
            proxy.switch(Backend(address))
            answer = await client.post(COMPLETIONS)
            assert answer.status_code == 502
            assert "does not answer" in answer.json()["error"]["message"]

    in_front_of_two(trial)


def test_a_route_takes_its_own_method_only(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        for method in ("PUT", "DELETE", "GET", "OPTIONS"):
            assert (await client.request(method, COMPLETIONS)).status_code == 405
        assert old.num_asked == 0

    in_front_of_two(trial)


OPEN_IN_VLLM = ["/collective_rpc", "/tokenize", "/server_info", "/invocations", "/reset_prefix_cache", "/", "/docs"]
IN_DISGUISE = ["/v1/models/../../tokenize", "/v1%2Fmodels", "//v1/models", "/v1/models/"]


def test_what_is_no_route_stays_inside_even_with_the_key(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        for method, path in itertools.product(("GET", "POST"), [*OPEN_IN_VLLM, *IN_DISGUISE]):
            answer = await raw_answer(client, f"{method} {path} HTTP/1.1", f"Authorization: Bearer {KEY}")
            assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405", b"HTTP/1.1 400"))
        assert old.num_asked == 0

    in_front_of_two(trial)


async def raw_answer(client: httpx.AsyncClient, *head: str) -> bytes:
    """Send the lines of a raw HTTP request to the proxy, and return the raw answer."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(("\r\n".join([*head, "Host: x", "Connection: close", "", ""])).encode())
    answer = await reader.read()
    writer.close()
    return answer


INNER = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n"


@pytest.mark.parametrize(
    ("lengths", "body"),
    [
        (["Content-Length: 5", "Transfer-Encoding: chunked"], b"0\r\n\r\n" + INNER),
        (["Content-Length: 0", f"Content-Length: {len(INNER)}"], INNER),
        (["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n" + INNER),
        (["Transfer-Encoding: xchunked"], b"0\r\n\r\n" + INNER),
        (["Content-Length : 0"], INNER),
        (["X: a\nContent-Length: 0"], INNER),
        (["X: " + "a" * 2**17], b""),
    ],
    ids=["both", "two", "chunked not last", "unknown", "space", "line feed", "huge"],
)
def test_a_request_within_another_reaches_no_engine(in_front_of_two, lengths, body):
    async def trial(old, new, next_behind, proxy, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *lengths, "", ""]
        writer.write("\r\n".join(head).encode() + body)
        with suppress(ConnectionError):  # who sends on when it was answered may not see the answer
            assert b" 400 " in (await reader.read()).splitlines()[0]
        writer.close()
        assert old.num_asked == 0

    in_front_of_two(trial)


def test_a_connection_does_not_become_another_protocol(in_front_of_two):
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]

    async def trial(old, new, next_behind, proxy, client):
        for path, status in (("/v1/models", b"200"), ("/v1/realtime", b"404")):
            answer = await raw_answer(client, f"GET {path} HTTP/1.1", f"Authorization: Bearer {KEY}", *upgrade)
            assert answer.startswith(b"HTTP/1.1 " + status)

    in_front_of_two(trial)


WRONG_KEYS = [None, "", "Bearer", "Bearer other", "Basic key", "bearer key", "Bearer keykey", "Bearer ke"]


def test_every_path_asks_for_the_key(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        client.headers.pop("authorization")
        for path, given in itertools.product([*ROUTES, *OPEN_IN_VLLM], WRONG_KEYS):
            headers = {} if given is None else {"authorization": given}
            assert (await client.request(ROUTES.get(path, "GET"), path, headers=headers)).status_code == 401
        assert old.num_asked == 0

    in_front_of_two(trial)


@pytest.mark.parametrize("announced", [True, False])
def test_a_request_that_is_too_large_is_refused(in_front_of_two, monkeypatch, announced):
    monkeypatch.setattr(proxy_module, "MAX_BODY_BYTES", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    async def trial(old, new, next_behind, proxy, client):
        answer = await client.post(COMPLETIONS, content=b"x" * 1100 if announced else parts())
        assert answer.status_code == 413
        assert old.num_asked == 0
        assert (await client.post(COMPLETIONS, content=b"x" * 1000)).status_code == 418

    in_front_of_two(trial)


def test_requests_beyond_the_bound_are_told_to_come_again(in_front_of_two, monkeypatch):
    monkeypatch.setattr(proxy_module, "MAX_REQUESTS", 2)

    async def trial(old, new, next_behind, proxy, client):
        under_way = [asyncio.create_task(client.post("/v1/chat/completions")) for _ in range(2)]
        await eventually(lambda: proxy._num_requests == 2)
        answer = await client.post(COMPLETIONS)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        old.go_on.set()
        assert {(await one).status_code for one in under_way} == {200}
        assert (await client.post(COMPLETIONS)).status_code == 418

    in_front_of_two(trial)


def test_an_answer_that_takes_too_long_is_cut_off(in_front_of_two, monkeypatch):
    async def trial(old, new, next_behind, proxy, client):
        limit_s = 0.5
        while not old.left_alone.is_set():  # on a busy machine, the time may be over before the answer has begun
            monkeypatch.setattr(proxy_module, "REQUEST_TIMEOUT_S", limit_s := 2 * limit_s)
            with pytest.raises(httpx.TransportError):
                await client.post("/v1/chat/completions")
            with suppress(TimeoutError):
                await asyncio.wait_for(old.left_alone.wait(), limit_s)

    in_front_of_two(trial)


def test_a_client_that_does_not_read_its_answer_is_cut_off(in_front_of_two, monkeypatch):
    monkeypatch.setattr(proxy_module, "REQUEST_TIMEOUT_S", 3.0)  # by then it was asked, on a busy machine too

    async def trial(old, new, next_behind, proxy, client):
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = ["GET /metrics HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "", ""]
        writer.write("\r\n".join(head).encode())
        await eventually(lambda: old.num_asked == 1)
        await eventually(lambda: proxy._num_requests == 0)
        writer.close()

    in_front_of_two(trial)


def test_an_engine_waits_for_a_client_that_reads_slowly_and_goes_on_when_it_reads(in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        async def comes_to_rest() -> int:
            sent = -1
            while sent != old.num_parts:
                sent = old.num_parts
                await asyncio.sleep(0.5)
            return sent

        async with client.stream("GET", "/metrics") as answer:
            parts = answer.aiter_bytes(2**16)
            await anext(parts)
            at_rest = await comes_to_rest()
            for number in range(2, at_rest + 100):
                assert await anext(parts) == b"%08x" % number * 2**13
            assert await comes_to_rest() > at_rest

    in_front_of_two(trial)


@pytest.fixture
def few_open_files():
    """Limit this process to a hundred more open files than it has now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_connections_are_taken_up_than_a_process_may_usually_open(few_open_files, in_front_of_two):
    async def trial(old, new, next_behind, proxy, client):
        host, port = client.base_url.host, client.base_url.port
        held = [await asyncio.open_connection(host, port) for _ in range(200)]
        assert await status_of(client) == 418
        for _, writer in held:
            writer.close()

    in_front_of_two(trial)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_that_asks_for_nothing_is_closed(in_front_of_two, monkeypatch, sent):
    monkeypatch.setattr(listening_module, "IDLE_TIMEOUT_S", 0.3)

    async def trial(old, new, next_behind, proxy, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(sent)
        await reader.read()
        writer.close()

    in_front_of_two(trial)


def test_a_body_that_does_not_come_is_not_waited_for(in_front_of_two, monkeypatch):
    monkeypatch.setattr(proxy_module, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(listening_module, "LINGER_S", 0.1)

    async def trial(old, new, next_behind, proxy, client):
        head = [f"POST {COMPLETIONS} HTTP/1.1", f"Authorization: Bearer {KEY}", "Content-Length: 5"]
        began_s = time.monotonic()
        assert (await raw_answer(client, *head)).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began_s < 10

    in_front_of_two(trial)


async def status_of(client: httpx.AsyncClient) -> int | None:
    """Request a completion, and return the HTTP status, or None if no answer comes."""
    try:
        return (await client.post(COMPLETIONS, content=json.dumps({}))).status_code
    except httpx.TransportError:
        return None


def test_connections_beyond_the_bound_are_closed(in_front_of_two, monkeypatch):
    monkeypatch.setattr(listening_module, "MAX_CONNECTIONS", 3)

    async def trial(old, new, next_behind, proxy, client):
        host, port = client.base_url.host, client.base_url.port
        held = [await asyncio.open_connection(host, port) for _ in range(3)]  # taken up in the order they came
        reader, writer = await asyncio.open_connection(host, port)
        with suppress(ConnectionError):
            assert await reader.read() == b""  # those that are held are open for longer than this test may take
        for _, one in [*held, (reader, writer)]:
            one.close()
        while (status := await status_of(client)) is None:  # until it has seen that they are closed
            await asyncio.sleep(0.01)
        assert status == 418

    in_front_of_two(trial)
