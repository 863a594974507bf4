"""A conversation in a terminal: the model is sent all that was said, and what it refuses ends nothing."""

import io
import signal
import sys
from pathlib import Path

import pytest

from stages.serve.__main__ import main
from stages.serve.chat import chat
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import API_KEY_VARIABLE, started_server
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, content in model_files(1000).items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "model"


def test_a_conversation(tiny_engine: TinyEngine, model, tmp_path, monkeypatch, capsys) -> None:
    said = ["What is 20 + 22?", "", "and 1?", "and?", "and 2?", "/new", "What is 1 + 2?", "/new", "1, in red?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))
    spec = new_launch_spec(model, "sums", ServingConfig())
    with started_server(spec, ServeExecution(), tmp_path / "log", tmp_path / "runtime") as server:
        server.wait_until_ready(30)
        chat(server.client)

    answers, refusals = capsys.readouterr()
    assert answers.splitlines() == ["it is 42", "it is 85", "it is 172", "it is 3", "\\x1b[31m\\x9bit is 1"]
    assert "answered 400" in refusals


def test_a_conversation_shows_no_key_that_nobody_needs(tiny_engine, model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 20 + 22?\n"))
    monkeypatch.setattr(sys, "argv", ["stages.serve", str(model), "--chat"])
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    said = capsys.readouterr().out
    assert "it is 42" in said and "serving model at http://" in said
    assert "key" not in said
