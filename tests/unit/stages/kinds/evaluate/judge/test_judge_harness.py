"""Evaluation by a judge model's ratings, with a real serving engine, judge server and evaluate stage."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.core.contract import StageContext, StageInput, StageResult
from stages.core.errors import EvaluationError, LifecycleError, RecipeError
from stages.kinds.evaluate.check import check
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import run
from stages.kinds.promote.paired import compare
from stages.remote import http
from tests.judge_server import COMPLETION_TOKENS, KEY, MODEL, PROMPT_TOKENS, Judge, answer_in, judge_server
from tests.serving import make_model
from tests.tiny_engine import TinyEngine

ROWS = [
    {"prompt": "What is 1 + 2?", "answer": "3"},
    {"messages": [{"role": "user", "content": "What is 20 + 22?"}]},
    {"prompt": "Who is there?"},
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tiny_engine: TinyEngine) -> Iterator[Judge]:
    """Provide the server of a judge model that rates numbers 9 out of 10, and all other answers 2."""
    monkeypatch.setenv("CRITIC_KEY", KEY)
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    handler = signal.getsignal(signal.SIGTERM)
    with judge_server() as judge:
        judge.says = lambda question: f"Rating: {9 if answer_in(question).isdigit() else 2}"
        yield judge
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_model(folder / "model")
    return folder


@pytest.fixture
def evaluated(server: Judge, model: Path, tmp_path: Path):
    """Provide a function that runs an evaluation with a fake judge model, and returns its result and work folder."""
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "helpful.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def evaluated(name: str = "work", **judge: Any) -> tuple[StageResult, Path]:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        context = StageContext(work, name, "0" * 12, {"sft": model}, {}, tmp_path / "cache")
        return run(config(server, tmp_path / "sets", **judge), context), work

    return evaluated


def config(server: Judge, sets: Path, **judge: Any) -> EvaluateConfig:
    judge_block = {"url": server.url, "served_model": MODEL, "key_variable": "CRITIC_KEY", **judge}
    tree = {"kind": "evaluate", "model": "sft", "harness": "judge", "tasks": ["helpful"], "task_folder": str(sets)}
    return EvaluateConfig.model_validate({**tree, "generation": {"max_tokens": 8}, "judge": judge_block})


def test_answers_are_rated_and_kept_with_what_the_judge_said_and_cost(evaluated, server: Judge) -> None:
    result, work = evaluated()
    assert result.metrics["helpful.rating"] == pytest.approx((9 + 9 + 2) / 3)
    assert result.metrics["helpful.rating_stderr"] == pytest.approx(7 / 3)  # s = 7 / √3, over √3
    assert (result.metrics["judge_requests"], result.metrics["num_unjudged"]) == (3, 0)
    assert result.metrics["judge_prompt_tokens"] == 3 * PROMPT_TOKENS
    assert result.metrics["judge_completion_tokens"] == 3 * COMPLETION_TOKENS
    assert result.tags["judge_version"] == "1"
    rows = [json.loads(line) for line in (work / "samples" / "helpful.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rows] == ["What is 1 + 2?", "What is 20 + 22?", "Who is there?"]
    assert [(row["resps"], row["rating"]) for row in rows] == [([["3"]], 9), ([["42"]], 9), ([["?"]], 2)]
    assert [row["judge_answers"] for row in rows] == [["Rating: 9"], ["Rating: 9"], ["Rating: 2"]]
    kept = [json.loads(line) for line in (work / "judge.jsonl").read_text().splitlines()]
    assert {line["number"] for line in kept} == {2, 9}
    assert all(KEY not in file.read_text(errors="ignore") for file in work.rglob("*") if file.is_file())
    asked = [one["messages"][0]["content"] for one in server.asked]
    assert sum("A right answer:\n3\n" in one for one in asked) == 1


def test_two_evaluations_are_paired_sample_by_sample(evaluated, server: Judge) -> None:
    _, first = evaluated("first")
    server.says = lambda question: f"Rating: {9 if answer_in(question).isdigit() else 5}"
    _, second = evaluated("second")
    [difference] = compare([second], [first])
    assert (difference.name, difference.num_samples) == ("helpful.rating", 3)
    assert difference.difference == pytest.approx((0 + 0 + 3) / 3)
    assert difference.standard_error == pytest.approx(1.0)


def test_scores_of_another_rubric_cannot_be_compared(evaluated, server: Judge) -> None:
    _, first = evaluated("first")
    _, second = evaluated("second", template="{prompt}\nThe answer:\n{completion}\n\nSay")
    with pytest.raises(EvaluationError, match="the version of task helpful is critic-1, rubric "):
        compare([second], [first])


def test_what_the_judge_will_not_rate_is_left_out_and_beyond_a_bound_an_error(evaluated, server: Judge) -> None:
    server.says = lambda question: "Rating: 4" if re.search(r" \+ ", question) else "It is fine."
    result, work = evaluated(max_unjudged_fraction=0.5)
    assert (result.metrics["helpful.rating"], result.metrics["num_unjudged"]) == (4, 1)
    assert result.metrics["judge_requests"] == 2 + 3
    rows = [json.loads(line) for line in (work / "samples" / "helpful.jsonl").read_text().splitlines()]
    assert (rows[2]["rating"], rows[2]["judge_answers"]) == (None, ["It is fine."])
    with pytest.raises(
        EvaluationError, match=r"judging the answers to helpful: critic-1 at .* gave no number for 1 of 3, such as 'It"
    ):
        evaluated("strict", max_unjudged_fraction=0.1)


def test_another_attempt_asks_nobody_again(evaluated, server: Judge) -> None:
    first, _ = evaluated()
    server.asked.clear()
    again, _ = evaluated()
    assert again.metrics == first.metrics
    assert len(server.asked) == 1, "the trial"


def test_more_requests_than_the_recipe_says_are_refused(evaluated, server: Judge) -> None:
    with pytest.raises(EvaluationError, match=r"judging 3 completions takes 3 requests .* `max_requests` is 2"):
        evaluated(max_requests=2)


@pytest.mark.parametrize(
    ("judge", "error", "expected"),
    [
        ({"key_variable": "NO_SUCH_KEY"}, RecipeError, "the environment has no NO_SUCH_KEY"),
        ({"served_model": "critic-2"}, LifecycleError, "answered 404"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_found_before_a_server_starts(
    evaluated, tmp_path: Path, judge: dict[str, str], error: type[LifecycleError], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        evaluated(**judge)
    assert not (tmp_path / "work" / "server.log").exists()


def test_bad_rows_and_missing_sets_are_found_by_the_check(server: Judge, model: Path, tmp_path: Path) -> None:
    def problems() -> list[str]:
        stage_input = StageInput(
            name="scores",
            kind="evaluate",
            version="0" * 12,
            config=config(server, tmp_path).model_dump(mode="json"),
            inputs={"sft": model},
            cache=tmp_path,
        )
        return [f"{field}: {error}" for field, error in check(stage_input)]

    [missing] = problems()
    assert "reading the questions of helpful: no files of the split 'helpful'" in missing
    (tmp_path / "helpful.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": 3}\n')
    [bad] = problems()
    assert "reading the questions of helpful: helpful.jsonl:2 " in bad
    (tmp_path / "helpful.jsonl").write_text('{"prompt": "Why?"}\n')
    assert problems() == []


def test_a_recipe_without_a_judge_or_with_one_that_nobody_asks_is_refused(server: Judge, tmp_path: Path) -> None:
    whole = config(server, tmp_path)
    without = whole.model_copy(update={"judge": None})
    assert list(without.problems_among({"sft": whole}))[-1].startswith("judge: is missing; with `harness: judge` say")
    idle = dict(whole.model_copy(update={"harness": "lm_eval"}).idle_fields())
    assert idle["judge"] == "the harness is lm_eval: no judge is asked"
    with pytest.raises(ValidationError, match="there is no harness 'juge'; did you mean judge"):
        EvaluateConfig.model_validate({"kind": "evaluate", "model": "sft", "harness": "juge", "tasks": ["helpful"]})
