"""Chat in a terminal (`--chat`) sends the whole conversation to the model, and goes on after a refused question."""

import io
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.cli.store_commands import chat as chat_command
from stages.kinds.serve.__main__ import main
from stages.kinds.serve.chat import Conversation, chat
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import API_KEY_VARIABLE, started_server
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine
from tests.unit.stages.data.media.odd_pictures import odd_pictures


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
        chat([Conversation(server.client, "sums")])

    answers, refusals = capsys.readouterr()
    assert answers.splitlines() == ["it is 42", "it is 85", "it is 172", "it is 3", "\\x1b[31m\\x9bit is 1"]
    assert "answered 400" in refusals


@pytest.fixture
def talk(model, tmp_path, monkeypatch, capsys):
    """Provide a function that chats by `python -m stages.kinds.serve MODEL --chat`, and returns what was printed."""

    def talk(questions: str, *options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
        monkeypatch.setattr(sys, "argv", ["stages.kinds.serve", str(model), "--chat", *options])
        monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
        monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return capsys.readouterr().out

    return talk


def test_a_conversation_shows_no_key_that_nobody_needs(tiny_engine, talk) -> None:
    said = talk("What is 20 + 22?\n")

    assert "it is 42" in said and "serving model at http://" in said
    assert "key" not in said


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}


@pytest.mark.parametrize(
    ("generation", "options", "sampling"),
    [
        (None, [], "temperature 0.0"),
        ({"eos_token_id": 1}, [], "temperature 0.0"),
        ({**SAMPLED, "do_sample": False}, [], "temperature 0.0"),
        ({"temperature": "hot"}, [], "temperature 0.0"),
        (SAMPLED, [], "temperature 0.6 by top_p 0.95"),
        ({"temperature": 0.3}, [], "temperature 0.3"),
        ({"do_sample": True}, [], "temperature 1.0"),
        (SAMPLED, ["--temperature=0.25", "--max-tokens=7"], "temperature 0.25 by max_tokens 7"),
    ],
)
def test_a_trial_samples_as_asked_else_as_the_model_says_else_greedily(
    generation, options, sampling, tiny_engine, model, talk
) -> None:
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))

    assert talk("1 + 2 by what?", *options).splitlines()[-1] == f"it is 3 by {sampling}"


def test_a_system_message_begins_each_conversation(tiny_engine, talk) -> None:
    said = talk("1?\n2?\n/new\n3?", "--system=- 1000").splitlines()

    assert said[-3:] == ["it is 1001", "it is 2004", "it is 1003"]


def test_each_question_is_answered_by_both_models(tiny_engine, model, tmp_path, talk) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps(SAMPLED))

    def answers(*names: str) -> list[str]:
        options = ["--version=1", *names[:1], "--beside", json.dumps([str(other), "--version=2", *names[1:]])]
        said = talk("1?\n2 by?\nno number\n/new\n5?", *options).splitlines()
        return said[next(place for place, line in enumerate(said) if line.startswith("[")) :]

    by = "by temperature 0.6 by top_p 0.95"
    assert answers() == [
        *("[model]", "it is 1", "[other]", "it is 1"),
        *("[model]", "it is 4 by temperature 0.0", "[other]", f"it is 4 {by}"),
        *("[model]", "[other]", "[model]", "it is 5", "[other]", "it is 5"),
    ]
    assert answers("--name=sft", "--name=sft")[::2][:2] == ["[sft-1]", "[sft-2]"]
    assert {file.name for file in (tmp_path / "home" / "servers").iterdir()} == {
        *("model.log", "other.log", "sft-1.log", "sft-2.log")
    }


def test_pictures_are_checked_before_a_server_starts(model, talk, capsys, tmp_path) -> None:
    picture, page = tmp_path / "one.png", tmp_path / "page.html"
    picture.write_bytes(odd_pictures()["one pixel"])
    page.write_text("<html>")

    def refusal(*options: str) -> str:
        with pytest.raises(SystemExit):
            talk("1?", *options)
        return capsys.readouterr().err

    assert "reads text alone" in refusal(f"--image={picture}")
    (model / "preprocessor_config.json").write_text("{}")
    assert "is no picture that can be opened" in refusal(f"--image={page}")
    assert "is not served with videos" in refusal(f"--video={page}")
    (model / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2}')
    (model / "trained_on.json").write_text('{"conversations": true, "media": ["video"]}')
    assert "is no video that can be decoded" in refusal(f"--video={page}")
    assert "takes 1 in a request" in refusal(*[f"--image={picture}"] * 2, '--serving={"max_images": 1}')


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--temperature", "nan"], "'nan' is not in the range 0<=x<=2"),
        (["--temperature", "2.5"], "2.5 is not in the range 0<=x<=2"),
        (["--max-tokens", "0"], "0 is not in the range x>=1"),
    ],
)
def test_wrong_options_of_a_conversation_are_named(options, problem) -> None:
    ended = CliRunner().invoke(chat_command, ["sft", *options])

    assert ended.exit_code == 2
    assert problem in ended.output
