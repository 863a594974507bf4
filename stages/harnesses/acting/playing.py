"""Evaluation by episodes: the served model acts on the questions of sets, and rewards judge each episode."""

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.core.fields import OutsideInput, marked_values, without
from stages.core.intervals import NUM_CUT
from stages.harnesses.harness import EpisodesConfig, Evaluation, Results
from stages.harnesses.question_sets import asked_row, prompt_options, question_folder, sampling_options
from stages.rewards.judging import Judgement, judging
from stages.rewards.reward import RewardContext
from stages.rollouts.acting import PlayedEpisode, episode_metrics, episode_rows, judged, play_all, turn_reader
from stages.rollouts.asking import request_seed
from stages.rollouts.episode_table import EPISODES_FILE, write_episodes
from stages.rollouts.prompts import RenderedPrompt, check_room, read_prompts
from stages.serving.served_models import ServedModel


def check_template(evaluation: Evaluation, model: Path, base: Path) -> None:
    """Raise EvaluationError if a model's chat template is unfit for the environment, or questions for the rewards.

    base: folder of an adapter's base model, else the model's.
    """
    try:
        for task in evaluation.tasks:
            turn_reader(model, base, _episodes(evaluation).environment, _prompts(evaluation, task, model))
    except DataError as error:
        raise EvaluationError(str(error)) from error


def played(evaluation: Evaluation, context: StageContext, model: ServedModel, version: str) -> Results:
    """Let the served model act on all questions, judge its episodes, and return scores and samples.

    version: of the harness. Raises EvaluationError for bad questions, an environment that fails, or rewards that cannot
    judge; ServerError and TransientError.
    """
    config = _episodes(evaluation)
    samples: dict[str, list[dict[str, Any]]] = {}
    together: list[PlayedEpisode] = []
    rewards = RewardContext(context.inputs, context.scratch / f"rewards-{context.version}", context.warn)
    try:
        with judging(config.rewards, rewards) as judge:
            for task in evaluation.tasks:
                prompts = _prompts(evaluation, task, model.asked_folder)
                episodes = _played(task, prompts, evaluation, context, model)
                if failures := [one.failure for one in episodes if one.failure]:
                    raise EvaluationError(
                        f"the environment failed in {len(failures)} of {len(episodes)} episodes of {task}, whose "
                        f"scores are unknown: at first, {failures[0]}; fix that, and run the stage again: the other "
                        "episodes are kept"
                    )
                named = [
                    (f"episode {one.sample} of the question in {prompts[one.prompt].place}", completion)
                    for one in episodes
                    for completion in [prompts[one.prompt].completion(one.text, one.num_tokens)]
                ]
                judgements = judged(judge, named, episodes)
                rows = episode_rows(prompts, episodes, judgements)
                write_episodes(_episodes_file(context, evaluation, task), rows)
                samples[task] = _rows(prompts, episodes, judgements, config)
                together += episodes
    except DataError as error:
        raise EvaluationError(str(error)) from error
    metrics = {**episode_metrics(together), NUM_CUT: float(sum(one.end == "tokens" for one in together))}
    contents = {field: content for field, content in context.outside.items() if field.startswith("episodes.")}
    return Results(_scores(evaluation, samples, [version, contents]), samples, metrics)


def _episodes(evaluation: Evaluation) -> EpisodesConfig:
    assert evaluation.episodes, "`ActingHarness.problems` has asked for them"
    return evaluation.episodes


def _episodes_file(context: StageContext, evaluation: Evaluation, task: str) -> Path:
    name = EPISODES_FILE if len(evaluation.tasks) == 1 else f"{task.replace('/', '_')}-{EPISODES_FILE}"
    return context.work / name


def _prompts(evaluation: Evaluation, task: str, model: Path) -> list[RenderedPrompt]:
    config = _episodes(evaluation)
    as_asked = replace(
        prompt_options(evaluation, task),
        apply_chat_template=True,
        rewards=config.rewards,
        environment=config.environment,
    )
    return read_prompts(
        None if config.makes_questions(evaluation.task_folder) else question_folder(evaluation), as_asked, model
    )


def _played(
    task: str, prompts: Sequence[RenderedPrompt], evaluation: Evaluation, context: StageContext, model: ServedModel
) -> list[PlayedEpisode]:
    config = _episodes(evaluation)
    options = sampling_options(evaluation, config.num_samples, _seed(evaluation, task))
    check_room(prompts, model.context_tokens, options.max_tokens)
    kept = context.scratch / f"episodes-{context.version}-{hashlib.sha256(task.encode()).hexdigest()[:12]}.jsonl"

    def report(num_done: int, num_all: int) -> None:
        context.progress(num_done, num_all, "episodes", f"acting on {task}")

    return play_all(model, prompts, config.environment, options, kept, report, context.warn)


def _seed(evaluation: Evaluation, task: str) -> int:
    """Return the seed of a task's episodes, which no other task and no stage that generates or trains has."""
    purpose = hashlib.sha256(f"evaluate {task}".encode()).digest()
    return request_seed(evaluation.seed or 0, int.from_bytes(purpose[:8], "big"))


def _rows(
    prompts: Sequence[RenderedPrompt],
    episodes: Sequence[PlayedEpisode],
    judgements: Sequence[Judgement],
    config: EpisodesConfig,
) -> list[dict[str, Any]]:
    """Return a row for each question: the transcripts of its episodes, mean rewards, and pass@k."""
    rows = []
    for number, asked in enumerate(prompts):
        # The episodes of a question stand together, in the order of the questions.
        own = slice(number * config.num_samples, (number + 1) * config.num_samples)
        totals = [one.total for one in judgements[own]]
        names = judgements[own][0].rewards
        num_solved = sum(total > config.solved_above for total in totals)
        rows.append(
            {
                "doc_id": number,
                "filter": "none",
                "resps": [[one.transcript] for one in episodes[own]],
                **asked_row(asked.prompt),
                **{name: statistics.fmean(one.rewards[name] for one in judgements[own]) for name in names},
                **{name: pass_at(k, len(totals), num_solved) for name, k in config.passes.items()},
                "ends": [one.end for one in episodes[own]],
            }
        )
    return rows


def pass_at(k: int, num_samples: int, num_solved: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _scores(
    evaluation: Evaluation, samples: dict[str, list[dict[str, Any]]], shared: Sequence[JsonValue]
) -> dict[str, Any]:
    """Return means over questions in the harnesses' schema; `versions` names what pairs of evaluations must share.

    shared: what they must share besides settings and seed, such as the contents of an author's file.
    """
    config = _episodes(evaluation)
    asked = without(config.model_dump(mode="json"), {path for path, _ in marked_values(config, OutsideInput)})
    settings = json.dumps([asked, evaluation.seed, *shared], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
    generation = evaluation.generation.model_dump(mode="json")
    return {
        "results": {task: _means(rows, config.metrics) for task, rows in samples.items()},
        "configs": {task: {"generation_kwargs": generation, "episodes": asked} for task in samples},
        "versions": dict.fromkeys(samples, f"episodes {digest}"),
        "n-shot": dict.fromkeys(samples, 0),
        "higher_is_better": {task: dict.fromkeys(config.metrics, True) for task in samples},
    }


def _means(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, float]:
    """Return each metric's mean over the questions, and its standard error, s / √n."""
    scores: dict[str, float] = {}
    for name in metrics:
        values = [row[name] for row in rows]
        scores[f"{name},none"] = statistics.fmean(values)
        if len(values) > 1:
            scores[f"{name}_stderr,none"] = statistics.stdev(values) / math.sqrt(len(values))
    return scores
