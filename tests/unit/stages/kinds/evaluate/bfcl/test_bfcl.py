"""Evaluation by BFCL: by night with its package (`make bfcl`); by day what is known without it.

The server is a script of a model that gives the right answers, so that every category's score must be 1.
"""

import ast
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stages.core.contract import StageContext
from stages.core.program import Program
from stages.harnesses.bfcl.asking import MEMORY_BYTES, PROGRAM, Checker, Question
from stages.harnesses.bfcl.categories import CATEGORIES
from stages.harnesses.harness import Results
from stages.harnesses.installation import BFCL
from stages.harnesses.registry import harness_of
from stages.hubs.builtin import qwen3_tools
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import _write
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.http_server import serving

CONTEXT = 200_000


def config(*tasks: str, limit: int = 1, **said: Any) -> EvaluateConfig:
    tree = {"kind": "evaluate", "model": "sft", "harness": "bfcl", "tasks": tasks, "serving": {}, "limit": limit}
    return EvaluateConfig.model_validate({**tree, "apply_chat_template": True, **said})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer = qwen3_tools.make_tokenizer()
    tokenizer.save_pretrained(made)
    (made / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": tokenizer.eos_token_id}))
    return made


class Server:
    """Server of a model that answers from a script: texts by the question's first words of a user."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.script: list[tuple[str, list[str]]] = []
        self.prompts: list[str] = []
        self.lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            prompt = self.tokenizer.decode(body["prompt"])
            self.prompts.append(prompt)
            # Some categories share a question: the first script that is not used up counts.
            texts = next((texts for words, texts in self.script if words in prompt and texts), ["I cannot help."])
            ids = self.tokenizer.encode(f"{texts.pop(0)}<|im_end|>")
        log_probabilities = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": log_probabilities}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    state = Server(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(state.answer(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        state.served = ServedModel(Client(url, "key", "sft"), folder, CONTEXT, False)  # type: ignore[attr-defined]
        yield state


def evaluate(read: EvaluateConfig, server: Any, work: Path) -> Results:
    work.mkdir(exist_ok=True)
    context = StageContext(work, "evaluate", "0123456789ab", {}, {}, work, {})
    results = harness_of(read.evaluation).evaluate(read.evaluation, context, lambda: server.served)
    _write(work, results)
    return results


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def value_of(candidate: Any) -> Any:
    """Return an argument that a checker takes for right: of nested objects, the first value of each."""
    if isinstance(candidate, dict):
        return {key: value_of(values[0]) for key, values in candidate.items() if values[0] != ""}
    return [value_of(one) for one in candidate] if isinstance(candidate, list) else candidate


def right_calls(question: Question) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for one in question.expected:
        ((name, arguments),) = one.items()
        given = {key: value_of(values[0]) for key, values in arguments.items() if values[0] != ""}
        if "java" in question.category:  # whose arguments are texts in that language
            given = {key: one if isinstance(one, str) else json.dumps(one) for key, one in given.items()}
        calls.append((name.replace(".", "_"), given))
    return calls


def call_of(text: str, tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return a call that a multi-turn question expects, such as `cd(folder='x')`, by keyword."""
    parsed = ast.parse(text, mode="eval").body
    assert isinstance(parsed, ast.Call) and isinstance(parsed.func, ast.Name)
    names = next(
        list(one["function"]["parameters"]["properties"]) for one in tools if one["function"]["name"] == parsed.func.id
    )
    by_place = dict(zip(names, map(ast.literal_eval, parsed.args), strict=False))
    return parsed.func.id, by_place | {str(one.arg): ast.literal_eval(one.value) for one in parsed.keywords}


def right_answers(question: Question) -> list[str]:
    """Return the texts of a model that answers right, in order."""
    if question.category.endswith("irrelevance"):
        return ["None of these tools can do that."]
    if question.category == "live_relevance":
        return [call_text(question.tools[0][0]["function"]["name"], {})]
    if not question.most_steps:
        return ["\n".join(call_text(*one) for one in right_calls(question))]
    texts, tools = [], [tool for tools in question.tools.values() for tool in tools]
    for turn in question.expected:
        texts += ["\n".join(call_text(*call_of(one, tools)) for one in turn)] if turn else []
        texts.append("That is done.")
    return texts


@pytest.fixture
def checker(tmp_path: Path) -> Iterator[Checker]:
    with Program(PROGRAM, limits(tmp_path), python=BFCL.find().python) as program:
        yield Checker(program)


def limits(folder: Path, **changed: Any) -> str:
    (folder / "package").mkdir(exist_ok=True)
    given = {"folder": str(folder / "package"), "with_tools": True, "timeout_s": 20, "memory_bytes": MEMORY_BYTES}
    return json.dumps({**given, **changed})


def contents(package: Path) -> dict[str, str]:
    files = (file for file in sorted(package.rglob("*")) if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.nightly
def test_every_category_scores_what_its_own_checkers_say_and_nothing_is_written_beside_it(
    server: Server, checker: Checker, tmp_path: Path
) -> None:
    package = BFCL.find().package
    before = contents(package), sorted(package.parent.iterdir())
    for category in CATEGORIES:
        (question,) = checker.questions(category, 1)
        server.script.append((question.turns[0][-1]["content"], right_answers(question)))
    results = evaluate(config(*CATEGORIES), server, tmp_path / "right")
    failed = {task: rows[0]["error"] for task, rows in results.samples.items() if rows[0]["accuracy"] != 1}
    assert not failed
    assert (contents(package), sorted(package.parent.iterdir())) == before


def problems(*tasks: str, **said: Any) -> list[str]:
    read = config(*tasks, **said)
    return list(harness_of(read.evaluation).problems(read.evaluation))


def test_what_is_not_run_is_refused_by_name_in_the_plan_and_a_misspelling_is_answered_with_near_names() -> None:
    assert not problems(*CATEGORIES)
    (search,) = problems("web_search")
    assert search.startswith("tasks: BFCL's web_search is not run here: its tools search the web, by a service with a")
    assert [
        problem.split(" is not run")[0] for problem in problems("memory_vector", "multiple", "format_sensitivity")
    ] == [
        "tasks: BFCL's memory_vector",
        "tasks: BFCL's format_sensitivity",
    ]
    assert problems("simple") == [
        "tasks: BFCL has no category 'simple'; did you mean simple_python or simple_java or simple_javascript?"
    ]
    (near,) = problems("multi_turn_bas")
    assert near.startswith("tasks: BFCL has no category 'multi_turn_bas'; did you mean multi_turn_base")
    (none,) = problems("gsm8k")
    assert "expected one of simple_python, simple_java" in none
