"""Paired comparison of evaluations equals scipy's and computations by hand; different questions are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stages.core.errors import EvaluationError
from stages.core.intervals import newcombe
from stages.kinds.promote.paired import Difference, Scores, compare, paired_difference
from tests.candidates import write_evaluation


def scores(values, *, higher_is_better=True, **setting):
    values = values if isinstance(values, dict) else dict(enumerate(values))
    keys = {document: (f"document {document}",) * 3 for document in values}
    return Scores("sums.exact_match", "sums", values, keys, {"version": 1.0, **setting}, higher_is_better)


def test_difference_and_standard_error_are_those_computed_by_hand():
    # d = 0, 1, -1, 1: mean 1/4; squares of deviations 1/16 + 9/16 + 25/16 + 9/16 = 44/16; / 3 / 4, root.
    found = paired_difference(scores([1, 1, 0, 1]), scores([1, 0, 1, 0]))
    assert found.difference == 0.25
    assert found.standard_error == pytest.approx(math.sqrt(44 / 16 / 3 / 4))
    assert found.interval == newcombe(both=1, only_first=2, only_second=1, neither=0)
    assert (found.candidate, found.reference, found.num_samples) == (0.75, 0.5, 4)


def test_the_interval_of_what_is_no_share_is_by_student_s_t():
    ours, theirs = [0.5, 1.0, 0.25, 0.75], [0.25, 0.5, 0.5, 0.25]
    found = paired_difference(scores(ours), scores(theirs))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))


def test_a_verdict_of_before_keeps_the_interval_that_it_was_given_with():
    before = Difference("sums.exact_match", 500, 0, 0.9375, 0.8875, 0.05, 0.0125, higher_is_better=True)
    assert before.shown_interval == pytest.approx((0.05 - 1.959964 * 0.0125, 0.05 + 1.959964 * 0.0125))
    of_wins = Difference("sums.win_rate", 4, 0, 1.0, 0.0, 1.0, 0.1, higher_is_better=True, largest=1.0)
    assert of_wins.shown_interval == pytest.approx((1 - 3.182446 * 0.1, 1.0))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=40))
def test_standard_errors_between_two_are_the_t_of_scipys_paired_test(pairs):
    ours, theirs = zip(*pairs, strict=True)
    found = paired_difference(scores(ours), scores(theirs))
    if found.standard_error > 1e-6 and abs(found.difference) > 1e-6:
        assert -found.regression_standard_errors == pytest.approx(stats.ttest_rel(ours, theirs).statistic, rel=1e-6)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=30))
def test_what_is_identical_has_no_difference_and_no_error(values):
    found = paired_difference(scores(values), scores(values))
    assert (found.difference, found.standard_error, found.regression_standard_errors) == (0, 0, 0)


def test_pairing_shows_what_separate_standard_errors_hide():
    easy = [1.0] * 50 + [0.0] * 50
    better = [1.0] * 56 + [0.0] * 44
    found = paired_difference(scores(better), scores(easy))
    alone = math.hypot(stats.sem(easy), stats.sem(better))
    assert found.difference / alone < 1 < 2 < found.difference / found.standard_error


def test_a_score_that_is_better_when_lower_regresses_when_it_rises():
    values, more = [1.0, 2.0, 3.0], [1.5, 2.0, 3.5]
    rising = paired_difference(scores(more, higher_is_better=False), scores(values, higher_is_better=False))
    falling = paired_difference(scores(values, higher_is_better=False), scores(more, higher_is_better=False))
    assert rising.regression_standard_errors == -falling.regression_standard_errors > 0


def test_a_difference_that_is_the_same_everywhere_is_infinitely_sure():
    assert paired_difference(scores([0, 0]), scores([1, 1])).regression_standard_errors == math.inf


def test_only_documents_that_both_answered_count():
    found = paired_difference(scores({0: 1.0, 1: 0.0, 2: 1.0}), scores({1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}))
    assert (found.num_samples, found.num_unpaired, found.difference) == (2, 3, 0.5)


def test_one_sample_is_no_comparison():
    with pytest.raises(EvaluationError, match="1 samples were answered by both"):
        paired_difference(scores({0: 1.0, 1: 1.0}), scores({1: 0.0, 2: 0.0}))


def test_another_version_of_the_task_is_refused():
    with pytest.raises(EvaluationError, match=r"the version of task sums is 2.0 here and 1.0 there"):
        paired_difference(scores([1, 0], version=2.0), scores([1, 0]))


def evaluation(folder, answers, **differing):
    write_evaluation(folder, answers, **differing)
    return [folder]


def test_scores_are_read_from_the_samples_of_an_evaluation(tmp_path):
    (found,) = compare(evaluation(tmp_path / "ours", [1, 1, 0]), evaluation(tmp_path / "theirs", [1, 0, 0]))
    assert (found.name, found.difference) == ("sums.exact_match", pytest.approx(1 / 3))


def test_other_prompts_are_refused(tmp_path):
    theirs = evaluation(tmp_path / "theirs", [1, 0], prompt="chat")
    with pytest.raises(EvaluationError, match=r"document 0 of task sums differs in its prompt.*baselines"):
        compare(evaluation(tmp_path / "ours", [1, 0]), theirs)


def test_nothing_in_common_is_no_comparison(tmp_path):
    with pytest.raises(EvaluationError, match=r"comparing sums\.exact_match with no scores"):
        compare(evaluation(tmp_path / "ours", [1, 0]), [])


def test_a_score_that_is_no_mean_over_samples_is_left_out(tmp_path):
    ours, theirs = (evaluation(tmp_path / name, [1, 0]) for name in ("ours", "theirs"))
    original = (tmp_path / "ours" / "scores.json").read_text()
    (tmp_path / "ours" / "scores.json").write_text(
        original.replace('"exact_match,none": 0.5', '"exact_match,none": 17.3')
    )
    with pytest.raises(EvaluationError, match="comparing no scores"):
        compare(ours, theirs)


def test_an_evaluation_without_its_samples_is_named(tmp_path):
    ours = evaluation(tmp_path / "ours", [1, 0])
    (tmp_path / "ours" / "samples" / "sums.jsonl").unlink()
    with pytest.raises(EvaluationError, match="reading the samples of ours: FileNotFoundError"):
        compare(ours, ours)


def test_an_answer_that_holds_a_separator_of_lines_is_one_sample(tmp_path):
    ours = evaluation(tmp_path / "ours", [1, 0])
    file = tmp_path / "ours" / "samples" / "sums.jsonl"
    file.write_text(file.read_text().replace("document 0", "document\u2028 0"), encoding="utf-8")
    assert [one.difference for one in compare(ours, ours)] == [0]
