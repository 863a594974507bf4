"""Stand-in for a serving engine with OpenAI's chat API, in the test's process.

It answers with its own name, whole or streamed, and records requests.
Its `/metrics` are those of an engine that has labels of its own, and families without any.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from stages.serving.backend import EngineAddress
from tests.http_server import serving

METRICS = """\
# HELP engine:requests_total Answers "so far".
# TYPE engine:requests_total counter
engine:requests_total{model_name="a \\"quoted\\" {name}",engine="0"} 7.0
engine:requests_total{} 3.0
# HELP engine:waiting Requests that wait.
# TYPE engine:waiting gauge
engine:waiting 2.0
# HELP engine:latency_seconds Of answers.
# TYPE engine:latency_seconds histogram
engine:latency_seconds_bucket{le="0.5"} 1.0
engine:latency_seconds_bucket{le="+Inf"} 4.0
engine:latency_seconds_count 4.0
engine:latency_seconds_sum 2.5
"""
PROMPT_TOKENS = 5
PARTS = ("it ", "is ", "me")


@dataclass
class OpenAIEngine:
    """Settings of the stand-in for a serving engine: its name, and how it answers requests.

    status: of its answers. breaks_off: in the middle of a stream. message: instead of its name. deltas: of a stream.
    accepted: formats that its metrics were asked in. go_on: a stream waits for it after each of its parts.
    """

    name: str
    status: int = 200
    finish_reason: str = "stop"
    breaks_off: bool = False
    message: dict[str, Any] | None = None
    deltas: list[dict[str, Any]] = field(default_factory=lambda: [{"content": part} for part in PARTS])
    asked: list[dict[str, Any]] = field(default_factory=list)
    accepted: list[str | None] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def listening(self) -> Iterator[EngineAddress]:
        self.go_on.set()
        with serving(type("Handler", (Handler,), {"engine": self})) as url:
            try:
                yield EngineAddress(port=int(url.rpartition(":")[2]))
            finally:
                self.go_on.set()


class Handler(BaseHTTPRequestHandler):
    engine: OpenAIEngine

    def do_GET(self) -> None:
        self.engine.accepted.append(self.headers["Accept"])
        self._answer(METRICS.encode(), "text/plain")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.engine.asked.append(asked)
        if self.engine.status != 200:
            self._answer(b"{}", "application/json", self.engine.status)
        elif asked.get("stream"):
            self._stream(asked)
        else:
            message = self.engine.message or {"role": "assistant", "content": self.engine.name}
            choice = {"index": 0, "message": message, "finish_reason": self.engine.finish_reason}
            usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 2}
            self._answer(json.dumps({"choices": [choice], "usage": usage}).encode(), "application/json")

    def _stream(self, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        if self.engine.breaks_off:
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        for number, delta in enumerate(self.engine.deltas):
            last = number == len(self.engine.deltas) - 1
            self._event(
                {
                    "choices": [
                        {"index": 0, "delta": delta, "finish_reason": self.engine.finish_reason if last else None}
                    ]
                }
            )
            self.engine.go_on.wait(600)
            if self.engine.breaks_off:
                return
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(self.engine.deltas)}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: ")  # an event comes in two pieces
        self.wfile.flush()
        self.wfile.write(json.dumps(content).encode() + b"\n\n")

    def _answer(self, body: bytes, content_type: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
