"""Promotion gates report which of them a candidate passes, and by how much it misses the others."""

import math

import pytest

from stages.core.errors import EvaluationError
from stages.kinds.promote.config import GatesConfig
from stages.kinds.promote.paired import Difference
from stages.kinds.promote.verdict import Measurements, judge


def measured(**changes):
    regressed = Difference("sums.exact_match", 100, 0, 0.85, 0.9, -0.05, 0.02, True)
    known = {"scores": {"sums.exact_match": 0.85}, "differences": [regressed], "size_mib": 2.0}
    return Measurements(**{**known, **changes})


def missed(found=None, **gates):
    bounds = GatesConfig(**{"max_regression_standard_errors": None, **gates})
    return {gate.name: gate.missed_by for gate in judge(bounds, found or measured()) if not gate.holds}


@pytest.mark.parametrize(
    ("gates", "name", "by"),
    [
        ({"min_scores": {"sums.exact_match": 0.9}}, "sums.exact_match", 0.05),
        ({"max_scores": {"sums.exact_match": 0.8}}, "sums.exact_match", 0.05),
        ({"max_regression_standard_errors": 2.0}, "regression of sums.exact_match (standard errors)", 0.5),
        ({"max_size_mib": 1.5}, "size_mib", 0.5),
    ],
)
def test_a_missed_gate_says_by_how_much(gates, name, by):
    assert missed(**gates) == {name: pytest.approx(by)}


def test_bounds_themselves_are_kept():
    assert missed(min_scores={"sums.exact_match": 0.85}, max_regression_standard_errors=2.5, max_size_mib=2) == {}


def test_cost_of_serving_and_of_quantization_are_gates():
    costs = measured(kl_nats_per_token=0.06, output_tokens_per_s=90.0)
    found = missed(costs, max_kl_nats_per_token=0.05, min_output_tokens_per_s=100)
    assert found == {"kl_nats_per_token": pytest.approx(0.01), "output_tokens_per_s": pytest.approx(10)}


def test_what_came_of_training_may_differ_by_so_much():
    found = measured(max_abs_logprob_difference=0.03)
    gap = {"max_abs_logprob_difference": pytest.approx(0.02)}
    assert missed(found, max_abs_logprob_difference=0.01) == gap
    assert missed(found, max_abs_logprob_difference=0.05) == {}
    with pytest.raises(EvaluationError, match="bounds max_abs_logprob_difference, but nothing measured it"):
        missed(measured(), max_abs_logprob_difference=0.01)


def test_other_prompts_with_pictures_than_in_training_are_never_promoted():
    assert missed(measured(differing_picture_prompts=1.0)) == {"differing_picture_prompts": 1.0}
    assert missed(measured(differing_picture_prompts=0.0)) == {}


def test_what_is_no_number_passes_no_gate():
    assert math.isnan(missed(measured(kl_nats_per_token=math.nan), max_kl_nats_per_token=0.05)["kl_nats_per_token"])


def test_a_gate_on_what_nothing_measured_is_an_error_and_names_the_closest():
    with pytest.raises(EvaluationError, match="output_tokens_per_s, but nothing measured it"):
        missed(min_output_tokens_per_s=100)
    with pytest.raises(EvaluationError, match=r"did you mean sums\.exact_match\?"):
        missed(min_scores={"sums.exact_matsch": 0.9})


def test_a_gate_that_the_recipe_leaves_out_is_not_asked():
    assert judge(GatesConfig(max_regression_standard_errors=None), measured()) == []
