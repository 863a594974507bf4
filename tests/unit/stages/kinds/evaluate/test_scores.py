"""Scores of lm-eval become metrics with standard errors, and with separate names for each answer filter."""

from stages.harnesses.scores import score_metrics


def test_every_score_comes_with_its_standard_error() -> None:
    results = {
        "addition": {"alias": "addition", "exact_match,none": 0.5, "exact_match_stderr,none": 0.02, "sample_len": 9}
    }

    assert score_metrics(results) == {"addition.exact_match": 0.5, "addition.exact_match_stderr": 0.02}


def test_scores_through_several_filters_stay_apart() -> None:
    results = {"gsm8k": {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.75}}

    assert score_metrics(results) == {
        "gsm8k.strict-match.exact_match": 0.25,
        "gsm8k.flexible-extract.exact_match": 0.75,
    }


def test_what_has_no_value_gives_no_metric() -> None:
    results = {"mmlu": {"acc,none": 0.5, "acc_stderr,none": "N/A", "perplexity,none": float("nan")}}

    assert score_metrics(results) == {"mmlu.acc": 0.5}
