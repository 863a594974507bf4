"""Pairwise comparison of two models' answers by an LLM judge, which sees each pair in both orders.

In: evaluations of both on the same question sets (`samples/TASK.jsonl` with `question` and `resps`). Out: per task the
share of answers that the judge prefers, ties half (the win rate), as a paired difference; and `judge.jsonl`, all
questions and answers of the judge.
"""

import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.harnesses.pictures import MEDIA, recorded_question
from stages.harnesses.scores import read_samples
from stages.kinds.promote.paired import ASKED_ALIKE, Difference, win_rate_interval
from stages.rewards.judge import JudgeClient, PairsConfig, bounded, cost_metrics
from stages.rewards.reward import Completion

JUDGE_FILE = "judge.jsonl"
METRIC = "win_rate"
PROGRESS_EVERY = 10
Rows = Mapping[int, Mapping[str, Any]]
"""Samples of an evaluation task, by document number."""


@dataclass(frozen=True)
class AnswersToTask:
    """Samples of one question set, and the evaluation's artifact that holds them."""

    task: str
    rows: Rows
    evaluation: Path


@dataclass(frozen=True)
class JudgedPairs:
    """Win rates of a candidate against another model, as decided by an LLM judge.

    differences: by task, named `TASK.win_rate`. metrics: win rates, standard errors, and the judge's cost.
    """

    differences: list[Difference]
    metrics: dict[str, float]


def judged_pairs(
    pairs: PairsConfig, candidate: Sequence[Path], reference: Sequence[Path], context: StageContext
) -> JudgedPairs:
    """Let an LLM judge compare the answers of the candidate and a reference model to the same questions.

    Raises EvaluationError for no common question or too few judgements; RecipeError, ServerError and TransientError for
    the judge.
    """
    ours, theirs = _answered(candidate), _answered(reference)
    tasks = [task for task in ours if task in theirs]
    if not tasks:
        raise EvaluationError(
            f"comparing answers in pairs: the candidate has answered {', '.join(ours) or 'no question set'}, the other "
            f"{', '.join(theirs) or 'none'}; evaluate both on the same set with `harness: judge`"
        )
    kept = context.scratch / f"judge-{context.version}.jsonl"
    try:
        with JudgeClient.opened(pairs, kept) as judge:
            judge.try_out(max(len(row.get(MEDIA, ())) for task in tasks for row in ours[task].rows.values()))
            differences = [_compared(ours[task], theirs[task].rows, judge, pairs, context) for task in tasks]
    except DataError as error:
        raise EvaluationError(str(error)) from error
    shutil.copyfile(kept, context.work / JUDGE_FILE)
    metrics = cost_metrics(kept)
    for rate in differences:
        low, high = ((1 + end) / 2 for end in rate.shown_interval)  # from 2w - 1 back to the rate w
        context.milestone(f"{rate.name} {rate.candidate:.4f}, 95% interval {low:.4f} to {high:.4f}")
        metrics |= {rate.name: rate.candidate, f"{rate.name}_stderr": rate.standard_error / 2}
    return JudgedPairs(differences, metrics)


def _compared(
    answers: AnswersToTask, theirs: Rows, judge: JudgeClient, pairs: PairsConfig, context: StageContext
) -> Difference:
    """Return the win rate w on one question set, the mean of outcomes wᵢ from 0 to 1.

    The other model's rate is 1 − w, so the difference is the mean of 2wᵢ − 1.
    """
    task, ours, evaluation = answers.task, answers.rows, answers.evaluation
    shared = sorted(ours.keys() & theirs.keys())
    completions = [_pair(task, number, ours[number], theirs[number], evaluation) for number in shared]
    wins: list[float] = []
    for number, opinion in enumerate(bounded(judge, completions, f"pairs of {task}", pairs.max_unjudged_fraction), 1):
        wins += [] if opinion.score is None else [opinion.score]
        if number % PROGRESS_EVERY == 0 or number == len(shared):
            context.progress(number, len(shared), "pairs", f"judging {task}")
    if len(wins) < 2:
        raise EvaluationError(
            f"comparing answers to {task}: the judge compared {len(wins)} pairs; expected at least 2, so ask more"
        )
    rate = statistics.fmean(wins)
    standard_error = 2 * statistics.stdev(wins) / math.sqrt(len(wins))  # of 2w - 1: twice that of w
    return Difference(
        name=f"{task}.{METRIC}",
        num_samples=len(wins),
        num_unpaired=len(ours.keys() | theirs.keys()) - len(wins),
        candidate=rate,
        reference=1 - rate,
        difference=2 * rate - 1,
        standard_error=standard_error,
        higher_is_better=True,
        interval=win_rate_interval(2 * rate - 1, standard_error, len(wins)),
    )


def _pair(task: str, number: int, ours: Mapping[str, Any], theirs: Mapping[str, Any], evaluation: Path) -> Completion:
    """Return a question with both models' answers, the other's as reference; EvaluationError if questions differ.

    evaluation: artifact of the samples, which names the folder of their pictures.
    """
    if any(ours[key] != theirs[key] for key in ASKED_ALIKE):
        raise EvaluationError(
            f"comparing answers to {task}: question {number} is not the same for both; evaluate both on the same set"
        )
    question, answer = ours["question"], ours["resps"][0][0]
    asked, address = recorded_question(ours, evaluation)
    return Completion(question, answer, 0, theirs["resps"][0][0], ours["doc"], asked, address)


def _answered(evaluations: Sequence[Path]) -> dict[str, AnswersToTask]:
    """Return the samples of question sets, by task; raise EvaluationError for unreadable files."""
    answers: dict[str, AnswersToTask] = {}
    for folder in evaluations:
        try:
            for task in json.loads((folder / "scores.json").read_bytes())["configs"]:
                rows = read_samples(folder, task)
                if rows and "question" in rows[0]:
                    answers[task] = AnswersToTask(task, {row["doc_id"]: row for row in rows}, folder)
        except (OSError, ValueError, KeyError) as error:
            raise EvaluationError(f"reading the answers of {folder.name}: {type(error).__name__}: {error}") from error
    return answers
