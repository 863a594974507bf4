"""The promote stage decides by its gates, notices a candidate that is champion already, and writes its tables."""

import math

import pytest

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.promote.run import run
from stages.kinds.promote.verdict import CHAMPION_FILE, Champion, ComparedChampion, Verdict
from tests.candidates import write_evaluation, write_model

GOOD, WORSE = [1.0] * 90 + [0.0] * 10, [1.0] * 60 + [0.0] * 40


@pytest.fixture
def judge(tmp_path):
    """Provide a function that runs the promote stage on a candidate's answers, against a champion's if given."""

    def judge(answers, champion=None, same_model=False, **config):
        write_model(tmp_path / "model", "candidate")
        write_evaluation(tmp_path / "scores", answers)
        if champion:
            write_evaluation(tmp_path / "champion", champion)
        evaluations = (tmp_path / "champion",) if champion and not same_model else ()
        current = Champion(version="7", same_model=same_model, evaluations=evaluations) if champion else None
        work = tmp_path / "work"
        work.mkdir()
        (work / CHAMPION_FILE).write_text(ComparedChampion(champion=current).model_dump_json())
        inputs = {"model": tmp_path / "model", "scores": tmp_path / "scores", "other": tmp_path / "champion"}
        settings = {"kind": "promote", "name": "adder", "model": "model", "evaluations": ["scores"], **config}
        context = StageContext(work, "promote", "0" * 12, inputs, {}, tmp_path / "cache")
        result = run(PromoteConfig.model_validate(settings), context)
        return result, Verdict.model_validate_json((work / "verdict.json").read_bytes()), work

    return judge


def test_without_a_champion_the_gates_that_are_left_decide(judge):
    result, verdict, _ = judge(GOOD, gates={"min_scores": {"sums.exact_match": 0.8}})
    assert (result.tags["verdict"], verdict.against) == ("promoted", None)


def test_a_worse_candidate_is_not_promoted_and_the_table_says_why(judge):
    result, verdict, work = judge(WORSE, champion=GOOD)
    assert result.tags["verdict"] == "not promoted"
    assert result.metrics["sums.exact_match_difference"] == pytest.approx(-0.3)
    assert "missed by" in verdict.missed[0]
    table = (work / "verdict.md").read_text()
    assert "# adder: not promoted" in table
    assert "| sums.exact_match | 100 | 0 | 0.6000 | 0.9000 | -0.3000 | 0.0461 | -0.3912 to -0.2067 |" in table
    assert set(result.files) == {"verdict.md", "verdict.json"}


def test_the_champion_itself_is_already_champion_and_differs_by_nothing(judge):
    result, verdict, _ = judge(GOOD, champion=GOOD, same_model=True)
    assert verdict.outcome == "already champion"
    assert result.metrics["sums.exact_match_difference"] == 0


def test_a_named_baseline_stands_in_place_of_the_champion(judge):
    _, verdict, _ = judge(GOOD, champion=WORSE, baselines=["other"])
    assert (verdict.outcome, verdict.against) == ("promoted", "other")


def test_without_a_gate_on_regression_the_champion_need_not_be_comparable(judge):
    _, verdict, _ = judge(GOOD, champion=[1.0], gates={"max_regression_standard_errors": None})
    assert (verdict.outcome, verdict.against) == ("promoted", None)


def test_a_champion_of_other_samples_is_no_measure(judge):
    with pytest.raises(EvaluationError, match="expected at least 2"):
        judge(GOOD, champion=[1.0])


def test_a_first_champion_that_nothing_asks_for_a_score_is_warned_of(judge):
    _, verdict, work = judge(WORSE)
    [warning] = verdict.warnings
    assert warning.startswith("nothing asks for a score: no model to compare with")
    assert warning.endswith("sums.exact_match 0.6")
    assert f"**Warning:** {warning}" in (work / "verdict.md").read_text()
    assert f'"warning", "message": "{warning}"' in (work / "events.jsonl").read_text()


def test_a_candidate_that_answers_nothing_right_is_warned_of(judge):
    _, verdict, _ = judge([0.0] * 20, champion=[0.0] * 20)
    assert (verdict.outcome, len(verdict.warnings)) == ("promoted", 1)
    assert verdict.warnings[0].startswith("sums.exact_match is 0")


def test_a_candidate_that_gates_ask_for_scores_is_not_warned_of(judge):
    _, verdict, _ = judge(GOOD, gates={"min_scores": {"sums.exact_match": 0.8}})
    assert verdict.warnings == ()


def test_the_verdict_has_every_gate_and_difference_as_data(judge):
    _, verdict, _ = judge(WORSE, champion=GOOD, gates={"min_scores": {"sums.exact_match": 0.5}})
    least, regression = verdict.gates
    assert (least.name, least.found, least.bound, least.holds) == ("sums.exact_match", pytest.approx(0.6), 0.5, True)
    assert regression.found == pytest.approx(0.3 / 0.0461, rel=1e-2)
    assert not regression.holds
    [difference] = verdict.differences
    assert (difference.num_samples, difference.difference) == (100, pytest.approx(-0.3))


def test_a_difference_without_spread_comes_back_as_infinite(judge):
    _, verdict, _ = judge([0.0] * 20, champion=[1.0] * 20)
    assert verdict.gates[0].found == math.inf
