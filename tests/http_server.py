"""A real HTTP server on the loopback, for the tests that are its world."""

import sys
from http.server import ThreadingHTTPServer


class LoopbackServer(ThreadingHTTPServer):
    """Says nothing of clients that go away: they are part of the tests, and a report, which comes whenever its thread
    notices, would stand in the output of another test.
    """

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
