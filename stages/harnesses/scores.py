"""Scores and samples that an evaluation's artifact holds: `scores.json`, and `samples/TASK.jsonl` with the answers."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.core.files import read_json_lines

NO_FILTER = "none"


def zero_scores(scores: Mapping[str, Any]) -> list[str]:
    """Return scores that are 0 although higher is better, most often from an unknown prompt format, to warn of."""
    names: list[str] = []
    for task, values in scores["results"].items():
        directions = scores["higher_is_better"].get(task, {})
        means = {key: value for key, value in values.items() if not key.partition(",")[0].endswith("_stderr")}
        zeros = {key: 0.0 for key, value in means.items() if value == 0 and directions.get(key.partition(",")[0], True)}
        names += score_metrics({task: zeros})
    return names


def score_metrics(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the scores of all tasks and groups by metric name, `TASK.METRIC` and `TASK.METRIC_stderr`.

    results: such as {"gsm8k": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1}}. A filter's
    score is named after it: `gsm8k.strict-match.exact_match`.
    """
    metrics = {}
    for task, scores in results.items():
        for key, value in scores.items():
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float) and math.isfinite(value):
                name = f"{task}.{metric}" if filter_name == NO_FILTER else f"{task}.{filter_name}.{metric}"
                metrics[name] = float(value)
    return metrics


def samples_file(evaluation: Path, task: str) -> Path:
    """Return the file of a task's samples; slashes in the task's name become underscores."""
    return evaluation / "samples" / f"{task.replace('/', '_')}.jsonl"


def samples_by_score(evaluation: Path) -> dict[str, int]:
    """Return the number of samples behind each score, by its name in the stage's metrics, if known."""
    try:
        scores = json.loads((evaluation / "scores.json").read_bytes())
    except (OSError, ValueError):
        return {}
    found: dict[str, int] = {}
    for task, results in scores["results"].items():
        if num_samples := _num_samples(evaluation, scores, task):
            found |= dict.fromkeys(score_metrics({task: results}), num_samples)
    return found


def _num_samples(evaluation: Path, scores: dict[str, Any], task: str) -> int | None:
    """Return a task's number of documents, which have a row for each filter; None for a group."""
    if counted := scores.get("n-samples", {}).get(task):
        return int(counted["effective"])
    with suppress(OSError, ValueError, KeyError):
        return len({row["doc_id"] for row in read_samples(evaluation, task)})
    return None


def read_samples(evaluation: Path, task: str) -> list[dict[str, Any]]:
    """Return the samples of a task as rows (schema in `stages/harnesses/harness.py`). Raises OSError or ValueError."""
    return read_json_lines(samples_file(evaluation, task))


def directions(evaluation: Path, file_stem: str) -> dict[str, bool]:
    """Return whether more is better in each metric of the task whose samples have this file name; none if unknown."""
    with suppress(OSError, ValueError, KeyError):
        found = json.loads((evaluation / "scores.json").read_bytes())["higher_is_better"]
        return next((one for task, one in found.items() if samples_file(evaluation, task).stem == file_stem), {})
    return {}


def sample_prompt(row: dict[str, Any]) -> str:
    """Return the prompt of an evaluated sample; of a multiple-choice question, the prompt of the first option."""
    requests = _requests(row)
    return requests[0][0] if requests else str(row.get("question") or row.get("doc", ""))


def sample_answer(responses: Any) -> Any:
    """Return the answer to a sample; multiple choice: (log-likelihood, whether it is the likeliest) per option."""
    texts = [response[0] if isinstance(response, list) and len(response) == 1 else response for response in responses]
    return texts[0] if len(texts) == 1 else texts


def answer_and_expected(row: dict[str, Any]) -> tuple[str, str]:
    """Return the model's answer and the right answer as texts; for multiple choice, the likeliest and right option."""
    answer, target = sample_answer(row["resps"]), row.get("target")
    expected = "" if target is None else str(target)
    choices = [request[1].strip() for request in _requests(row)]
    if len(choices) < 2 or not isinstance(answer, list) or len(answer) != len(choices):
        return str(answer), expected
    if len(set(choices)) < len(choices):  # the answers stand in the prompts, and the same text follows each
        choices = [f"choice {number}" for number in range(len(choices))]
    likeliest = max(range(len(choices)), key=lambda number: answer[number][0])
    is_number = expected.isdecimal() and int(expected) < len(choices)
    return choices[likeliest], choices[int(expected)] if is_number else expected


def _requests(row: dict[str, Any]) -> list[list[str]]:
    """Return the lm-eval requests of a sample, each as prompt and continuation; empty for other harnesses."""
    arguments = row.get("arguments", ())
    requests = arguments.values() if isinstance(arguments, dict) else arguments
    return [[str(part) for part in (one.values() if isinstance(one, dict) else one)] for one in requests]
