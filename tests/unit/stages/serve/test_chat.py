"""A conversation in a terminal: the model is sent all that was said, and what it refuses ends nothing."""

import io
import sys
from pathlib import Path

import pytest

from stages.serve.chat import chat
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import started_server
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
    assert answers.splitlines() == ["it is 42", "it is 85", "it is 172", "it is 3", "�[31m�it is 1"]
    assert "answered 400" in refusals
