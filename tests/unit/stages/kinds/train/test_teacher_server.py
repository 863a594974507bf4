"""Distillation teachers on a server: answers are matched to tokens, and unsuitable servers refused early."""

import json
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from stages.core.contract import StageInput
from stages.core.errors import ModelError, RecipeError, ServerError, TransientError
from stages.kinds.train.check import check
from stages.kinds.train.teacher import PROBE, ServedTeacher
from tests.http_server import serving
from tests.train_stage import make_artifacts, make_config

DATA = {"dataset": "problems", "sequence_length": 64}
KEY = "a-key-that-is-secret"
MODEL = "wise"


def said_of(document: list[int], place: int) -> dict[str, float]:
    """Return a fake teacher's log-probabilities of its top three tokens and, as vLLM does, of the actual token."""
    likeliest = {f"token_id:{100 * place + rank}": -0.5 - rank for rank in range(3)}
    return {f"token_id:{document[place]}": -9.0, **likeliest}


@dataclass
class Served:
    """State of a fake teacher server, which first answers completion requests with the HTTP codes in `statuses`."""

    tokens_of_probe: list[int] | None
    url: str = ""
    max_logprobs: int = 20
    statuses: list[int] = field(default_factory=list)
    num_asked: int = 0


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def served(artifacts) -> Iterator[Served]:
    tokenizer = AutoTokenizer.from_pretrained(artifacts["base"] / "model")
    state = Served(tokenizer.encode(PROBE, add_special_tokens=False))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": MODEL}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.num_asked += 1
                status = state.statuses.pop() if state.statuses else 200
            if request.get("logprobs", 0) > state.max_logprobs:
                self.answer(
                    400, {"error": f"at most {state.max_logprobs} logprobs for {self.headers['Authorization']}"}
                )
            elif request["prompt"] == PROBE:
                self.answer(status, {"choices": [{"prompt_token_ids": state.tokens_of_probe}]})
            else:
                document = request["prompt"]
                top = [None, *(said_of(document, place) for place in range(1, len(document))), {"token_id:7": -0.1}]
                self.answer(status, {"choices": [{"logprobs": {"top_logprobs": top}}]})

        def answer(self, status: int, content: object) -> None:
            if self.headers["Authorization"] != f"Bearer {KEY}":
                status, content = 401, {"error": f"not with {self.headers['Authorization']}"}
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        state.url = f"{url}/behind/v1"
        yield state


def config_of(served, **changed):
    named = {"url": served.url, "served_model": MODEL, "key_variable": "TEACHER_KEY"}
    distill = {"loss_top_k": 3, "teacher_server": {**named, **changed.pop("server", {})}, **changed}
    return make_config("distill", data=DATA, distill=distill)


def teacher_of(config):
    return ServedTeacher.of(config.teacher_tokens, config.execution)


def found(config, artifacts, tmp_path):
    """Return the problems found before training with the server of a distillation teacher."""
    stage_input = StageInput(
        name="small", kind="train", version="0", config=config.model_dump(mode="json"), inputs=artifacts, cache=tmp_path
    )
    return [error for field, error in check(stage_input) if field == "distill.teacher_server"]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)


def test_each_token_but_the_first_has_the_likeliest_in_its_place(served):
    documents = [[11, 12, 13], [5, 6], [9]]
    served.statuses = [503]  # it is busy once, and asked again
    answers = teacher_of(config_of(served)).likeliest(documents)
    assert [len(one) for one in answers] == [2, 1, 0]
    assert answers[0]["tokens"].tolist() == [[100, 101, 102], [200, 201, 202]]
    assert answers[0]["log_probabilities"].tolist() == [[-0.5, -1.5, -2.5]] * 2
    assert answers[1]["tokens"].tolist() == [[100, 101, 102]]
    assert served.num_asked == 4


def test_a_server_that_repeats_the_key_does_not_bring_it_into_a_message(served, artifacts, tmp_path, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "another-secret")
    (problem,) = found(config_of(served), artifacts, tmp_path)
    assert "answered 401" in str(problem)
    assert "another-secret" not in "".join(traceback.format_exception(problem))


def test_a_server_that_does_all_is_no_problem(served, artifacts, tmp_path):
    assert found(config_of(served), artifacts, tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"server": {"served_model": "other"}}, ServerError, "serves wise, not other; name one of these"),
        ({"loss_top_k": 21}, ServerError, r"at most 20 .*started with `--max-logprobs 21`"),
        ({"loss_top_k": 5}, ServerError, "asking the teacher's server for 5 log-probabilities .*: it gave 4 at token"),
        (
            {"loss_top_k": 100_000},
            RecipeError,
            "`loss_top_k` asks for 100000 tokens of the teacher, whose vocabulary has",
        ),
        ({"server": {"key_variable": "NOT_SET"}}, RecipeError, "the environment has no NOT_SET, which"),
        ({"server": {"key_variable": None}}, ServerError, "answered 401"),
        ({"server": {"url": "http://127.0.0.1:9/v1"}}, TransientError, "does not answer: .*; start the teacher's serv"),
    ],
)
def test_what_a_server_cannot_do_is_named_before_training(served, artifacts, tmp_path, changed, error, message):
    (problem,) = found(config_of(served, **changed), artifacts, tmp_path)
    assert isinstance(problem, error)
    assert KEY not in str(problem)
    with pytest.raises(error, match=f"(?s){message}"):
        raise problem


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2, 3], ModelError, "has another tokenizer than the model in"),
        (None, ServerError, "does not return the tokens it read"),
    ],
)
def test_another_tokenizer_is_named(served, artifacts, tmp_path, tokens, error, message):
    served.tokens_of_probe = tokens
    (problem,) = found(config_of(served), artifacts, tmp_path)
    assert isinstance(problem, error)
    assert message in str(problem)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher": "large"}, "`teacher` is large, and `distill.teacher_server` names another one; remove one"),
        ({"temperature": 2.0}, "`temperature` is 2, but a server .* of the temperature 1 alone"),
        ({"url": "http://key@host/v1"}, "should match pattern"),
        ({"url": "http://host/"}, "should match pattern"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    named = {"url": fields.get("url", "http://host/v1"), "served_model": MODEL}
    distill = {"teacher_server": named} | {name: fields[name] for name in ("temperature",) if name in fields}
    teacher = {name: fields[name] for name in ("teacher",) if name in fields}
    with pytest.raises(ValidationError, match=message):
        make_config("distill", data=DATA, distill=distill, **teacher)


def test_where_it_is_served_is_identity_and_who_serves_it_no_stage():
    named = {"url": "http://host/v1", "served_model": MODEL}
    config = make_config("distill", data=DATA, distill={"teacher_server": named})
    assert config.identity()["distill"]["teacher_server"]["url"] == "http://host/v1"
    assert "teacher" not in config.references()
    alone = make_config("distill", data=DATA, teacher="large")
    assert "teacher_server" not in alone.identity()["distill"], "or versions would change"
