"""Evaluation by BFCL: by night with its package (`make bfcl`); by day what is known without it.

The server is a script of a model that gives the right answers, so that every category's score must be 1.
"""

import ast
import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.core.program import Program
from stages.data.messages import make_message
from stages.harnesses.bfcl.asking import MEMORY_BYTES, PROGRAM, BoundError, Checker, Question, Talk
from stages.harnesses.bfcl.categories import CATEGORIES
from stages.harnesses.harness import Results
from stages.harnesses.installation import BFCL
from stages.harnesses.registry import harness_of
from stages.hubs.builtin import qwen3_tools
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import _write
from stages.kinds.promote.paired import compare
from stages.rollouts.acting import ServedTurn
from stages.rollouts.environments.environment import Action, Call
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.http_server import answering
from tests.serving import run_to_the_end, write_work

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
    with answering(state.answer) as url:
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


DIRECT = """
import json, os, sys

os.environ["BFCL_PROJECT_ROOT"] = os.getcwd()
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.utils import is_java, is_js, load_dataset_entry, load_ground_truth_entry

name = next(name for name, one in MODEL_CONFIG_MAPPING.items() if one.underscore_to_dot and "_" not in name)
verdicts = []
for number, (category, place, answer) in enumerate(json.load(sys.stdin)):
    entry = load_dataset_entry(category, include_language_specific_hint=False)[place]
    expected = load_ground_truth_entry(category)[place]["ground_truth"]
    if "multi_turn" in category:
        shown = [[f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in turn] for turn in answer]
        calls = [[turn] if turn else [] for turn in shown]
        found = multi_turn_checker(calls, expected, entry, category, f"model{number}")
    else:
        language = Language.JAVASCRIPT if is_js(category) else Language.JAVA if is_java(category) else Language.PYTHON
        found = ast_checker(entry["function"], [{n: a} for n, a in answer], expected, language, category, name)
    verdicts.append(bool(found["valid"]))
print(json.dumps(verdicts))
"""
"""Program that calls BFCL's checkers as they are, without a handler, a runner or a process for each answer."""
NUM_EACH = 4


def changed(value: Any) -> Any:
    return f"{value}x" if isinstance(value, str) else 987654


@pytest.mark.nightly
def test_each_verdict_is_that_of_the_checker_called_directly(checker: Checker, tmp_path: Path) -> None:
    cases: list[tuple[str, int, Any]] = []
    ours: list[bool] = []
    for category in (one for one in CATEGORIES if not one.endswith("relevance")):
        for place, question in enumerate(checker.questions(category, NUM_EACH)):
            if question.most_steps:
                tools = [tool for tools in question.tools.values() for tool in tools]
                right: Any = [[call_of(one, tools) for one in turn] for turn in question.expected]
                answers = [right, [*right[:-1], []], [[], *right[1:]], [right[0][:1], *right[1:]]]
                given = [
                    [[[{n: json.dumps(a)} for n, a in turn]] if turn else ["ok"] for turn in one] for one in answers
                ]
            else:
                right = right_calls(question)
                name, arguments = right[0]
                first = {**arguments, **{key: changed(value) for key, value in list(arguments.items())[:1]}}
                answers = [right, [(name, first), *right[1:]], right[1:], [*right, right[0]], [("f", {}), *right[1:]]]
                given = [[{n: json.dumps(a)} for n, a in one] for one in answers]
            for answer, as_asked in zip(answers, given, strict=True):
                if answer:
                    cases.append((category, place, answer))
                    ours.append(checker.verdict(question, as_asked)["valid"])
    command = [str(BFCL.find().python), "-c", DIRECT]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert ours == theirs
    assert 0.2 < sum(ours) / len(ours) < 0.6, f"{sum(ours)} of {len(ours)} are right"


@pytest.mark.nightly
def test_what_an_answer_evaluates_reaches_nothing_and_ends_in_time(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    hostile = {
        "9**9**9**9 + 1": "took more than 3 s|ended with signal",
        f"__import__('os').system('touch {target}') + 1": None,
        f"open({str(target)!r}, 'w').fileno() + 1": None,
        "__import__('socket').socket().fileno() + 1": None,
        "__import__('os').fork() + 1": None,
        "'a' * 10**11 + 'b'": None,
        "__import__('os').kill(__import__('os').getppid(), 9) or 1 + 1": None,
        "__import__('os')._exit(0) or 1 + 1": None,
    }
    given = limits(tmp_path, with_tools=False, timeout_s=3)
    with Program(PROGRAM, given, python=BFCL.find().python) as program:
        asker = Checker(program)
        (question,) = asker.questions("simple_python", 1)
        for expression, bound in hostile.items():
            try:
                verdict = asker.verdict(question, f"[calculate_triangle_area(base={expression}, height=5)]")
            except BoundError as error:
                assert bound is None or re.search(bound, str(error)), f"{expression}: {error}"
            else:
                assert not verdict["valid"] and bound is None, f"{expression}: {verdict}"
        assert asker.verdict(question, "[calculate_triangle_area(base=10, height=5)]")["valid"]
    assert not target.exists()


@pytest.mark.nightly
def test_a_model_without_tools_answers_in_python_and_evaluations_are_paired_and_resumed(
    server: Any, checker: Checker, folder: Path, tmp_path: Path
) -> None:
    questions = checker.questions("simple_python", 3)
    (turns,) = checker.questions("multi_turn_base", 1)
    with_tools = [(one.turns[0][-1]["content"], right_answers(one)) for one in questions]
    server.script = [(words, list(texts)) for words, texts in with_tools]
    evaluate(config("simple_python", limit=3), server, tmp_path / "right")
    num_asked = len(server.prompts)
    again = evaluate(config("simple_python", limit=3), server, tmp_path / "right")
    assert (num_asked, len(server.prompts)) == (3, 3), "answers that are there are not asked for again"
    server.script = [(words, list(texts)) for words, texts in with_tools[1:]]
    evaluate(config("simple_python", limit=3), server, tmp_path / "worse")
    (difference,) = compare([tmp_path / "worse"], [tmp_path / "right"])
    assert (difference.name, difference.num_samples) == ("simple_python.accuracy", 3)
    assert (difference.difference, difference.standard_error) == pytest.approx((-1 / 3, 1 / 3))  # s = 1 / √3, over √3
    assert again.scores["results"]["simple_python"] == {"accuracy,none": 1.0, "accuracy_stderr,none": 0.0}

    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    server.served = replace(server.served, folder=plain)
    tools = [tool for tools in turns.tools.values() for tool in tools]
    python = []
    for turn in turns.expected:
        python += [as_python([call_of(one, tools) for one in turn]), "Done."]
    texts = [
        as_python([(name.replace("_", ".") if "." in text else name, given) for name, given in right_calls(one)])
        for one in questions
        for text in [str(one.expected)]
    ]
    server.script = [(one.turns[0][-1]["content"], [text]) for one, text in zip(questions, texts, strict=True)]
    server.script.append((turns.turns[0][-1]["content"], python))
    results = evaluate(config("simple_python", "multi_turn_base", limit=1), server, tmp_path / "prompted")
    assert [rows[0]["error"] for rows in results.samples.values()] == [None, None]
    assert "prompt mode" in results.scores["versions"]["simple_python"]
    assert "You are an expert in composing functions" in server.prompts[-1]
    with pytest.raises(EvaluationError, match="simple_python"):
        compare([tmp_path / "prompted"], [tmp_path / "right"])


def as_python(calls: list[tuple[str, dict[str, Any]]]) -> str:
    shown = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(shown)}]"


@pytest.mark.nightly
def test_a_real_server_is_asked_one_question_of_each_category(tmp_path: Path) -> None:
    model = tmp_path / "sft" / "model"
    model.mkdir(parents=True)
    qwen3_tools.make(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 1 << 16}))
    serving = {"dtype": "float32", "max_model_len": 1 << 16, "enforce_eager": True, "kv_cache_memory_gib": 0.5}
    asked = {"model": "sft", "harness": "bfcl", "tasks": CATEGORIES, "limit": 1, "serving": serving}
    asked |= {"apply_chat_template": True, "generation": {"max_tokens": 16}}
    result = run_to_the_end(write_work(tmp_path / "evaluate", "evaluate", asked, {"sft": tmp_path / "sft"}))
    assert set(result.metrics) >= {f"{category}.accuracy" for category in CATEGORIES}
    assert result.metrics["irrelevance.accuracy"] == 1, "a model that calls nothing is right there"
    assert result.tags["bfcl_version"] == BFCL.find().version


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


def sampled(text: str) -> ServedTurn:
    return ServedTurn([1, 2], [-0.5, -0.5], text, truncated=False)


def test_a_conversation_goes_on_until_an_answer_calls_nothing_and_ends_at_the_packages_bound_of_steps() -> None:
    question = Question(
        "multi_turn_base", "q", [[make_message("user", "Go.")], [make_message("user", "On.")]], {}, 2, []
    )
    talk = Talk(question)
    run: list[list[Any]] = []

    def steps(answers: Any) -> list[str] | None:
        run.append(list(answers))
        return ["moved"] if isinstance(answers[-1], list) else None

    call = Action("", (Call("cd", {"folder": "x"}),))
    talk.add(sampled(""), call, steps)
    talk.add(sampled("Done."), Action("Done."), steps)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert talk.messages[2]["tool_call_id"] == talk.messages[1]["tool_calls"][0]["id"]
    cd = [{"cd": '{"folder": "x"}'}]
    assert run == [[cd], [cd, "Done."]]
    for _ in range(3):
        assert not talk.is_over
        talk.add(sampled(""), call, steps)
    assert talk.is_over
    assert talk.outcome.answer == [[cd, "Done."], [cd, cd, cd]]
    assert run[-1] == [cd] * 4, "an answer that called nothing is not run again"

    def too_long(_: Any) -> list[str] | None:
        raise BoundError("it took more than 20 s")

    broken = Talk(question)
    broken.add(sampled("cut"), None, too_long)
    assert (broken.outcome.problem, broken.outcome.num_cut, broken.is_over) == ("it took more than 20 s", 1, True)
    single = Talk(replace(question, most_steps=0))
    single.add(sampled(""), call, too_long)
    assert (single.outcome.answer, single.is_over) == (cd, True)
