"""Reused connections to an engine: they save time, and lose no request when the engine closes one."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from stages.serving import engine_connections
from stages.serving.backend import Backend, EngineAddress
from stages.serving.proxy import Proxy, listening
from stages.serving.server import listening_socket

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
PATIENCE_S = 30.0


class Engine:
    """Fake engine that answers each request, or closes the connection without an answer if `closes` says so.

    closes, asked: by the number of the connection and that of its request, both from 1.
    """

    def __init__(self, closes: Callable[[int, int], bool]):
        self._closes = closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[tuple[int, int]] = []

    @contextmanager
    def listening(self) -> Iterator[EngineAddress]:
        thread = threading.Thread(target=self._accept)
        thread.start()
        try:
            yield EngineAddress(port=self._listener.getsockname()[1])
        finally:
            self.stop_listening()
            thread.join()

    def stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        """Accept one connection after the other in the fake engine, since these tests never use two at once."""
        for connection_number in range(1, 100):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._answer(connection, connection_number)

    def _answer(self, connection: socket.socket, connection_number: int) -> None:
        request_number, held = 0, b""
        while data := connection.recv(65536):
            held += data
            if not held.endswith(b"{}"):
                continue
            request_number, held = request_number + 1, b""
            self.asked.append((connection_number, request_number))
            if self._closes(connection_number, request_number):
                return
            connection.sendall(ANSWER)


@pytest.fixture(autouse=True)
def _kept_for_long(monkeypatch):
    """Keep the proxy's idle connections to its engine for longer than a busy machine takes between two requests."""
    monkeypatch.setattr(engine_connections, "KEEP_ALIVE_S", 600.0)


@contextmanager
def in_front(engine: Engine) -> Iterator[Callable[[], httpx.Response]]:
    """Provide a function that sends a request to the fake engine through a proxy."""
    with ExitStack() as stack:
        proxy = Proxy(Backend(stack.enter_context(engine.listening())), "key")
        public = stack.enter_context(listening_socket("127.0.0.1", None))
        stack.enter_context(listening(proxy, public))
        url = f"http://127.0.0.1:{public.getsockname()[1]}"
        client = stack.enter_context(
            httpx.Client(base_url=url, headers={"Authorization": "Bearer key"}, timeout=PATIENCE_S)
        )
        yield lambda: client.post("/v1/completions", content=b"{}")


def test_a_connection_is_used_again():
    engine = Engine(lambda connection, request: False)
    with in_front(engine) as ask:
        assert [ask().status_code for _ in range(3)] == [200] * 3
    assert engine.asked == [(1, 1), (1, 2), (1, 3)]


def test_one_that_was_idle_for_too_long_is_not(monkeypatch):
    monkeypatch.setattr(engine_connections, "KEEP_ALIVE_S", 0.01)
    engine = Engine(lambda connection, request: False)
    with in_front(engine) as ask:
        assert ask().status_code == 200
        threading.Event().wait(0.1)
        assert ask().status_code == 200
    assert engine.asked == [(1, 1), (2, 1)]


def test_one_that_is_closed_just_when_it_is_used_again_loses_no_request():
    engine = Engine(lambda connection, request: request == 2)
    with in_front(engine) as ask:
        assert [ask().status_code for _ in range(3)] == [200] * 3
    assert engine.asked == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]


def test_a_request_whose_new_connection_is_closed_is_not_sent_again():
    engine = Engine(lambda connection, request: connection > 1 or request > 1)
    with in_front(engine) as ask:
        assert ask().status_code == 200
        assert ask().status_code == 502
    assert engine.asked == [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("is_used_again", [False, True])
def test_what_an_engine_had_when_it_ended_is_known_as_sent(is_used_again):
    """A request that an ended engine had received is not sent again; else a crashing one would be repeated."""

    def ends(connection: int, request: int) -> bool:
        if request == 1 + is_used_again:
            engine.stop_listening()
        return request == 1 + is_used_again

    engine = Engine(ends)
    with in_front(engine) as ask:
        if is_used_again:
            assert ask().status_code == 200
        answer = ask()
    assert answer.status_code == 502
    assert "ServerDisconnectedError" in answer.text
