"""All sampled completions are returned, each with its own seed; a resumed round requests only missing ones."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import ServerError, TransientError
from stages.remote import http
from stages.rollouts.asking import Sample, ask_all, sample_all, seed_of
from stages.rollouts.options import SamplingOptions
from stages.serving.client import Client
from tests.http_server import serving

PROMPTS = [[1], [2, 3], [4]]
PATIENCE_S = 30.0


@dataclass
class Server:
    """State of a fake server that answers with the prompt and the seed, after the given HTTP errors.

    are_together: set once `waits_for` requests have come at a time, for which each of them waits.
    """

    url: str = ""
    asked: list[dict] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    most_at_a_time: int = 0
    waits_for: int = 1
    are_together: threading.Event = field(default_factory=threading.Event)
    waits_s: float = 0.0
    num_running: int = 0


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.num_running += 1
                state.most_at_a_time = max(state.most_at_a_time, state.num_running)
                if state.num_running >= state.waits_for:
                    state.are_together.set()
                status = state.statuses.pop() if state.statuses else 200
                state.asked += [asked] if status == 200 else []
            state.are_together.wait(PATIENCE_S)
            time.sleep(state.waits_s)
            with lock:
                state.num_running -= 1
            text = f"{asked['prompt']} {asked['seed']}"
            reason = "length" if asked["prompt"] == [4] else "stop"
            body = {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": 7}}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as state.url:
        yield state


def options(**changed: Any) -> SamplingOptions:
    return replace(SamplingOptions(4, 256, 1.0, 1.0, (), seed=0, concurrent_requests=3), **changed)


def sample(server: Server, kept: Path, model: str = "sft", **changed: Any) -> list[Sample]:
    client = Client(server.url, "key", model, timeout_s=PATIENCE_S)
    return sample_all(client, PROMPTS, options(**changed), kept, lambda done, total: None)


def test_every_sample_of_every_prompt_with_a_seed_of_its_own(server: Server, tmp_path: Path) -> None:
    server.waits_for, server.waits_s = 3, 0.2
    found = sample(server, tmp_path / "kept", stop=("\n",), temperature=0.5, top_p=0.9, max_tokens=3)
    assert [(one.prompt, one.sample) for one in found] == [(prompt, one) for prompt in range(3) for one in range(4)]
    assert len({one.seed for one in found}) == 12
    assert all(one.text == f"{PROMPTS[one.prompt]} {one.seed}" and one.num_tokens == 7 for one in found)
    assert [one.truncated for one in found] == [one.prompt == 2 for one in found]
    sent = {"model": "sft", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stop": ["\n"]}
    assert all(asked.items() >= sent.items() for asked in server.asked)
    assert server.most_at_a_time == 3
    assert found == sample(server, tmp_path / "again", stop=("\n",), temperature=0.5, top_p=0.9, max_tokens=3)
    assert not {one.seed for one in found} & {seed_of(options(seed=1), one.prompt, one.sample) for one in found}


def test_after_a_kill_only_what_is_missing_is_asked(server: Server, tmp_path: Path) -> None:
    whole = sample(server, tmp_path / "kept")
    lines = (tmp_path / "kept").read_bytes().splitlines(keepends=True)
    (tmp_path / "kept").write_bytes(b"".join(lines[:5]) + lines[5][:9])  # torn within a line
    server.asked.clear()
    assert sample(server, tmp_path / "kept") == whole
    assert len(server.asked) == 7


def test_a_kill_loses_nothing_that_was_answered(server: Server, tmp_path: Path) -> None:
    """A sampling process killed by SIGKILL while requests are running loses no answer that it received."""
    server.waits_s = 0.2
    program = (
        "import sys; from pathlib import Path; from tests.unit.stages.rollouts.test_sampling import *\n"
        "sample(Server(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, server.url, str(tmp_path / "kept")]
    root = Path(__file__).parents[4]
    with subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}) as process:
        while not (tmp_path / "kept").exists() or (tmp_path / "kept").read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = (tmp_path / "kept").read_bytes().count(b"\n")
    server.waits_s = 0.0
    # By another name of the model, since the server may still read what the killed process has sent.
    assert len(sample(server, tmp_path / "kept", model="again")) == 12
    assert [asked["model"] for asked in server.asked].count("again") == 12 - kept


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    server.statuses = [503, 429, 502]
    assert len(sample(server, tmp_path / "kept")) == 12
    assert len(server.asked) == 12


def test_a_refused_request_is_an_error_with_the_servers_words(server: Server, tmp_path: Path) -> None:
    server.statuses = [400]
    with pytest.raises(ServerError, match=r"answered 400: .*choices"):
        sample(server, tmp_path / "kept")


def test_a_server_that_is_gone_is_worth_another_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    with pytest.raises(TransientError, match="the connection failed"):
        sample(Server("http://127.0.0.1:9"), tmp_path / "kept")


def test_a_server_that_answers_nothing_is_given_up_after_a_while(server: Server) -> None:
    server.waits_s = 5.0
    client = Client(server.url, "key", "sft", timeout_s=60)
    with pytest.raises(TransientError, match=r"gave no answer for 0\.2 s"):
        ask_all(client, [(1, {"prompt": [1], "seed": 1})], 2, lambda *_: None, stall_s=0.2)
