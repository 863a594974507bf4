"""Server on the loopback that answers requests with arbitrary bytes, for tests of clients against malicious servers."""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class LyingServer:
    """Server that answers requests with arbitrary bytes, and keeps the requests (headers included) that it received."""

    url: str
    requests: list[bytes] = field(default_factory=list)


def head(status: str = "200 OK", **headers: str) -> bytes:
    """Return status line and headers of an HTTP response as bytes. headers: `_` in a name stands for `-`."""
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def whole(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Return a complete HTTP response with this body as bytes."""
    return head(status, Content_Length=str(len(body)), **headers) + body


@contextmanager
def lying_server(answer: Callable[[Callable[[bytes], None], bytes], None]) -> Iterator[LyingServer]:
    """Run a server that answers with arbitrary bytes until the `with` block ends.

    answer: called with a function that sends bytes, and the request; it ends when the client closes the connection.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            request = b""
            while b"\r\n\r\n" not in request and (part := connection.recv(65536)):
                request += part
            length = request.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            while len(request.partition(b"\r\n\r\n")[2]) < int(length or 0) and (part := connection.recv(65536)):
                request += part
            state.requests.append(request)
            with suppress(OSError):
                answer(connection.sendall, request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        state = LyingServer(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
