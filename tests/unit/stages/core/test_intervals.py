"""Confidence intervals equal scipy's and a published example, and contain the true value as often as promised."""

import itertools
import math

import pytest
from scipy import stats

from stages.core.intervals import newcombe, score_interval, student_t, wilson


@pytest.mark.parametrize(("right", "num_samples"), [(0, 30), (1, 7), (15, 30), (29, 30), (30, 30), (998, 1000)])
def test_wilson_is_scipy_s(right, num_samples):
    expected = stats.binomtest(right, num_samples).proportion_ci(method="wilson")
    assert wilson(right / num_samples, num_samples) == pytest.approx((expected.low, expected.high))


def test_newcombe_s_published_example():
    # Altman et al., "Statistics with Confidence", 2nd edition, chapter 6: 41 patients, 14 both, 5 and 0 one alone.
    assert newcombe(14, 5, 0, 22) == pytest.approx((0.011, 0.226), abs=1e-3)


@pytest.mark.parametrize("of", [(0.4, 0.1, 0.1, 0.4), (0.2, 0.3, 0.1, 0.4), (0.85, 0.05, 0.05, 0.05)])
def test_newcombe_holds_the_true_difference_about_as_often_as_it_says(of, num_samples=12):
    coverage = 0.0
    for counts in itertools.product(range(num_samples + 1), repeat=3):
        rest = num_samples - sum(counts)
        if rest < 0:
            continue
        low, high = newcombe(*counts, rest)
        if low - 1e-12 <= of[1] - of[2] <= high + 1e-12:
            coverage += stats.multinomial.pmf([*counts, rest], num_samples, of)
    assert 0.94 < coverage <= 1


def test_nothing_solved_is_no_certainty():
    low, high = score_interval(0.0, 0.0, 30)
    assert low == 0 and high == pytest.approx(0.1135, abs=1e-4)
    assert newcombe(0, 0, 0, 30) == pytest.approx((-high, high))


def test_a_score_that_is_no_share_has_student_s_interval():
    values = [0.2, 0.9, 0.5, 0.7]
    mean, error = sum(values) / 4, stats.sem(values)
    expected = stats.t.interval(0.95, 3, loc=mean, scale=error)
    assert score_interval(mean, error, 4) == pytest.approx(expected) == student_t(mean, error, 4)


def test_a_score_of_zeros_and_ones_is_known_by_its_error():
    values = [1, 0, 1, 1, 0, 1, 1, 1]
    assert score_interval(0.75, stats.sem(values), 8) == wilson(0.75, 8)
    assert score_interval(0.75, 0.2, None) == pytest.approx((0.75 - 1.96 * 0.2, 0.75 + 1.96 * 0.2), abs=1e-4)
    assert math.isclose(stats.sem(values), math.sqrt(0.75 * 0.25 / 7))
