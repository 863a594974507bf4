"""From a harness's results to the metrics of the stage (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NO_FILTER = "none"


def zero_scores(scores: Mapping[str, Any]) -> list[str]:
    """Names of the scores that are 0 where higher is better: most often the model does not know the prompt.

    scores: what a harness gives (`stages/harnesses/harness.py`).
    """
    names: list[str] = []
    for task, values in scores["results"].items():
        directions = scores["higher_is_better"].get(task, {})
        means = {key: value for key, value in values.items() if not key.partition(",")[0].endswith("_stderr")}
        zeros = {key: 0.0 for key, value in means.items() if value == 0 and directions.get(key.partition(",")[0], True)}
        names += score_metrics({task: zeros})
    return names


def score_metrics(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`TASK.METRIC` and `TASK.METRIC_stderr` of every task and group.

    results: such as {"gsm8k": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1}}.
    A score that was taken through a filter is named after it: `gsm8k.strict-match.exact_match`.
    """
    metrics = {}
    for task, scores in results.items():
        for key, value in scores.items():
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float) and math.isfinite(value):
                name = f"{task}.{metric}" if filter_name == NO_FILTER else f"{task}.{filter_name}.{metric}"
                metrics[name] = float(value)
    return metrics
