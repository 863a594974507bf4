"""Stand-in for a judge model: a real HTTP server with OpenAI's chat API."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import serving

KEY = "a-key-that-is-secret"
MODEL = "critic-1"
PROMPT_TOKENS, COMPLETION_TOKENS = 90, 7
"""Numbers of prompt and completion tokens that the judge reports with every answer."""


def rating(answer: str) -> int:
    """Return the stand-in judge's rating of an answer: the answer's length in characters, at least 1, at most 10."""
    return max(1, min(len(answer), 10))


def answer_in(question: str) -> str:
    return re.search(r"The answer:\n(.*?)\n\nSay", question, re.DOTALL)[1]


@dataclass
class Judge:
    """State of the stand-in for a judge: answers; `statuses` of the next, last first; `asked`: requests answered.

    max_images: most pictures in a question. says: gets a question's texts.
    """

    max_images: int = 0
    tokens_of_picture: int = 10
    says: Callable[[str], str] = lambda question: f"Hm.\nRating: {rating(answer_in(question))}"
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = field(
        default_factory=lambda: {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    )


@contextmanager
def judge_server() -> Iterator[Judge]:
    """Run the stand-in for a judge model; requests must have its API key and the name of its model."""
    state = Judge()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                status = state.statuses.pop() if state.statuses else 200
                state.asked += [request] if status == 200 else []
            if self.path != "/v1/chat/completions" or request["model"] != MODEL:
                status = 404
            if self.headers["Authorization"] != f"Bearer {KEY}":
                status = 401
            contents = [one["content"] for one in request["messages"]]
            parts = [part for one in contents if isinstance(one, list) for part in one]
            num_images = sum(part["type"] == "image_url" for part in parts)
            status = 400 if status == 200 and num_images > state.max_images else status
            question = "".join(part.get("text", "") for part in parts) or contents[-1]
            said = state.says(question) if status == 200 else ""
            answer: dict[str, Any] = {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]}
            of_pictures = num_images * state.tokens_of_picture
            answer["usage"] = usage = dict(state.usage) if state.usage else state.usage
            if usage and of_pictures:
                usage["prompt_tokens"] += of_pictures
            content = json.dumps(answer if status == 200 else {"error": f"not with {self.headers['Authorization']}"})
            self.send_response(status)
            self.send_header("Content-Length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        state.url = f"{url}/v1"
        yield state
