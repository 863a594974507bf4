"""A real judge model compares a candidate's answers with the champion's, in both orders, for a promotion."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from flows.recipe.recipe import load_stages
from stages.core.contract import StageContext
from stages.core.errors import EvaluationError, RecipeError
from stages.data.any_rows import Prompt
from stages.data.messages import PlainText
from stages.harnesses.question_sets import sample_row
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.run import run
from stages.kinds.promote.verdict import CHAMPION_FILE, Champion, ComparedChampion, Verdict
from stages.remote import http
from tests.candidates import write_model
from tests.judge_server import KEY, MODEL, Judge, judge_server

PAIR = re.compile(r"Answer A:\n(.*?)\n\nAnswer B:\n(.*?)\n\nSay", re.DOTALL)
GATES = {"max_regression_standard_errors": 2.0}
NUM_QUESTIONS = 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Provide the server of a judge model that prefers the longer answer, whatever the order."""
    monkeypatch.setenv("CRITIC_KEY", KEY)
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
    with judge_server() as judge:
        judge.says = prefers(lambda first, second: len(first) - len(second))
        yield judge


def prefers(by: Callable[[str, str], int]) -> Callable[[str], str]:
    def says(question: str) -> str:
        found = PAIR.search(question)
        if found is None:
            return "Better: A"  # the trial
        margin = by(*found.groups())
        return f"Better: {'A' if margin > 0 else 'B' if margin < 0 else 'equal'}"

    return says


def undecided_of_one(question: str) -> str:
    if "Question 3?" in question or "Write that line alone" in question:
        return "Both."
    return prefers(lambda first, second: len(first) - len(second))(question)


def write_answers(folder: Path, answers: Sequence[str], question: str = "Question") -> None:
    """Write the result files of an evaluation with `harness: judge` in which every answer was rated 5 or 6."""
    ratings = [5.0 + number % 2 for number in range(len(answers))]
    rows = [
        sample_row(
            number, Prompt(PlainText(f"{question} {number}?", ""), None, {"id": number}), answer, {"rating": rating}
        )
        for number, (answer, rating) in enumerate(zip(answers, ratings, strict=True))
    ]
    (folder / "samples").mkdir(parents=True)
    (folder / "samples" / "helpful.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mean = sum(ratings) / len(ratings)
    scores = {
        "results": {"helpful": {"rating,none": mean}},
        "configs": {"helpful": {}},
        "versions": {"helpful": "critic-1, rubric 1"},
        "n-shot": {"helpful": 0},
        "higher_is_better": {"helpful": {"rating": True}},
    }
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "result.json").write_text(json.dumps({"metrics": {"helpful.rating": mean}}))


@pytest.fixture
def promote(server: Judge, tmp_path: Path):
    """Provide a function that runs a promotion on given answers, and returns result, decision and work folder."""

    def promote(ours: Sequence[str], theirs: Sequence[str] | None, *, same: bool = False, **said: Any):
        write_model(tmp_path / "model", "candidate")
        write_answers(tmp_path / "scores", ours)
        if theirs:
            write_answers(tmp_path / "champion", theirs, said.pop("question", "Question"))
        champion = Champion(version="7", same_model=same, evaluations=(tmp_path / "champion",)) if theirs else None
        work = tmp_path / "work"
        work.mkdir()
        (work / CHAMPION_FILE).write_text(ComparedChampion(champion=champion).model_dump_json())
        inputs = {"model": tmp_path / "model", "scores": tmp_path / "scores"}
        gates = {**GATES, **said.pop("gates", {})}
        config = PromoteConfig.model_validate({**tree(server, **said), "gates": gates})
        result = run(config, StageContext(work, "promote", "0" * 12, inputs, {}, tmp_path / "cache"))
        return result, Verdict.model_validate_json((work / "verdict.json").read_bytes()), work

    return promote


def tree(server: Judge, **pairs: Any) -> dict[str, Any]:
    judge = {"url": server.url, "served_model": MODEL, "key_variable": "CRITIC_KEY", **pairs}
    return {"kind": "promote", "name": "helper", "model": "model", "evaluations": ["scores"], "pairs": judge}


def answers(*lengths: int) -> list[str]:
    return ["x" * length for length in lengths]


def test_a_win_rate_comes_with_its_interval_and_is_a_gate(promote, server: Judge) -> None:
    ours, theirs = answers(*[5] * 15, *[1] * 5), answers(*[3] * NUM_QUESTIONS)
    result, verdict, work = promote(ours, theirs, gates={"min_win_rate": 0.8})
    error = math.sqrt(0.75 * 0.25 / (NUM_QUESTIONS - 1))
    assert result.metrics["helpful.win_rate"] == 0.75
    assert result.metrics["helpful.win_rate_stderr"] == pytest.approx(error)
    win_rate = verdict.differences[-1]
    assert (win_rate.name, win_rate.candidate, win_rate.reference) == ("helpful.win_rate", 0.75, 0.25)
    low, high = stats.t.interval(0.95, NUM_QUESTIONS - 1, 0.75, error)
    assert win_rate.interval == pytest.approx((2 * low - 1, 2 * high - 1))
    assert verdict.outcome == "not promoted"
    assert verdict.missed == ("helpful.win_rate 0.75 < 0.8, missed by 0.05",)
    kept = [json.loads(line) for line in (work / "judge.jsonl").read_text().splitlines()]
    assert len(kept) == result.metrics["judge_requests"] == 2 * NUM_QUESTIONS
    assert "| helpful.win_rate | 20 | 0 | 0.7500 | 0.2500 | +0.5000 |" in (work / "verdict.md").read_text()
    assert KEY not in "".join(file.read_text(errors="ignore") for file in work.rglob("*") if file.is_file())


def test_the_interval_of_a_win_rate_ends_where_rates_do(promote) -> None:
    _, verdict, _ = promote(answers(*[5] * 7, 1), answers(*[3] * 8))
    assert verdict.differences[-1].interval == (pytest.approx(0.75 - 2.36462 * 0.25, abs=1e-5), 1.0)


def test_a_candidate_that_loses_falls_behind_like_with_any_other_score(promote) -> None:
    result, verdict, _ = promote(answers(*[1] * 18, 5, 5), answers(*[3] * NUM_QUESTIONS))
    assert result.tags["verdict"] == "not promoted"
    assert verdict.missed[0].startswith("regression of helpful.win_rate (standard errors) 5.8")


def test_a_judge_that_prefers_a_place_prefers_nobody(promote, server: Judge) -> None:
    server.says = prefers(lambda first, second: 1)
    result, verdict, _ = promote(answers(*[1] * NUM_QUESTIONS), answers(*[3] * NUM_QUESTIONS))
    assert result.metrics["helpful.win_rate"] == 0.5
    assert verdict.outcome == "promoted"


def test_without_another_model_nobody_is_asked(promote, server: Judge) -> None:
    _, verdict, _ = promote(answers(1, 2), None, gates={"min_win_rate": 0.5})
    assert (verdict.outcome, server.asked) == ("promoted", [])


def test_the_champion_is_not_compared_with_itself(promote, server: Judge) -> None:
    _, verdict, _ = promote(answers(1, 2), answers(1, 2), same=True)
    assert (verdict.outcome, server.asked) == ("already champion", [])


def test_more_pairs_than_the_recipe_pays_for_are_refused(promote) -> None:
    with pytest.raises(EvaluationError, match=r"judging 20 completions takes 40 requests .* `max_requests` is 30"):
        promote(answers(*[1] * NUM_QUESTIONS), answers(*[3] * NUM_QUESTIONS), max_requests=30)


def test_a_judge_of_prose_is_an_error_beyond_a_bound(promote, server: Judge) -> None:
    decided = prefers(lambda first, second: len(first) - len(second))
    server.says = lambda question: (
        "Both." if "Question 3?" in question or "Write that" in question else decided(question)
    )
    with pytest.raises(EvaluationError, match=r"judging pairs of helpful: .* no number for 1 of 20, such as 'Both"):
        promote(answers(*[1] * NUM_QUESTIONS), answers(*[3] * NUM_QUESTIONS))


def test_what_is_left_out_within_the_bound_is_counted(promote, server: Judge) -> None:
    decided = prefers(lambda first, second: len(first) - len(second))
    server.says = lambda question: (
        "Both." if "Question 3?" in question or "Write that" in question else decided(question)
    )
    _, verdict, _ = promote(answers(*[5] * 10, *[1] * 10), answers(*[3] * 20), max_unjudged_fraction=0.05)
    win_rate = verdict.differences[-1]
    assert (win_rate.num_samples, win_rate.num_unpaired) == (19, 1)
    assert win_rate.candidate == pytest.approx(9 / 19)


def test_answers_to_other_questions_are_no_measure(promote) -> None:
    with pytest.raises(EvaluationError, match=r"document \d+ of task helpful differs in its prompt"):
        promote(answers(1, 2), answers(1, 2), question="Another")


def test_pairs_without_answers_are_refused_with_the_recipe(server: Judge) -> None:
    stages = {
        "model": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "model", "tasks": ["sums"]},
        "promote": tree(server),
    }
    with pytest.raises(RecipeError, match=r"promote\.pairs: no evaluation has answers to compare; name one with"):
        load_stages("tiny", Path("/"), stages)
    bounded = {**tree(server), "pairs": None, "gates": {"min_win_rate": 0.5}}
    with pytest.raises(RecipeError, match=r"promote\.gates\.min_win_rate: nothing measures it; say in `pairs`"):
        load_stages("tiny", Path("/"), {**stages, "promote": bounded})
