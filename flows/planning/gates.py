"""Gates that no refresh could pass or miss, found before anything runs instead of after all training."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flows.recipe.recipe import Recipe
from stages.core.errors import RecipeError
from stages.harnesses.registry import harness_of
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.serve.config import ServeConfig

SHARES = ("acc", "acc_norm", "exact_match")
"""Metrics of lm-eval that are means of 0 and 1."""


def check_gates(recipe: Recipe, chosen: Collection[str]) -> None:
    """Raises `RecipeError` that lists the gates of these stages that ask for what nothing measures."""
    promotions = {name: config for name, config in recipe.stages.items() if isinstance(config, PromoteConfig)}
    problems = [
        f"stages.{name}.gates.{problem}"
        for name, config in promotions.items()
        if name in chosen
        for problem in [
            *_unmeasured_scores(config, recipe),
            *_beyond_a_share(config, recipe),
            *_unmeasured_throughput(config, recipe),
        ]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _unmeasured_scores(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    stages = [recipe.stages[name] for name in config.evaluations]
    evaluations = [stage.evaluation for stage in stages if isinstance(stage, EvaluateConfig)]
    for field, bounds in (("min_scores", config.gates.min_scores), ("max_scores", config.gates.max_scores)):
        for score in bounds:
            if not any(harness_of(evaluation).may_give(score, evaluation) for evaluation in evaluations):
                tasks = ", ".join(task for evaluation in evaluations for task in evaluation.tasks)
                yield (
                    f"{field}: no evaluation gives the score {score}; the tasks are {tasks}, and their scores are "
                    "called TASK.METRIC, or TASK.FILTER.METRIC where the task has filters"
                )


def _beyond_a_share(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    """Bounds of shares that are meant in percent, or that none misses; code of a person's own may give such scores in
    any way."""
    stages = [recipe.stages[name] for name in config.evaluations]
    if any(isinstance(stage, EvaluateConfig) and stage.trust_task_code for stage in stages):
        return
    for field, bounds, free in (("min_scores", config.gates.min_scores, 0), ("max_scores", config.gates.max_scores, 1)):
        for score, bound in bounds.items():
            if score.rpartition(".")[2] in SHARES and (bound == free or not 0 <= bound <= 1):
                advice = ", which nothing misses; be stricter, or remove it" if bound == free else "; say 0.4 for 40%"
                yield f"{field}: {score} is a share, from 0 to 1, and the bound is {bound:g}{advice}"


def _unmeasured_throughput(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    server = recipe.stages[config.server] if config.server else None
    if config.gates.min_output_tokens_per_s and isinstance(server, ServeConfig) and server.benchmark is None:
        yield f"min_output_tokens_per_s: {config.server} has no `benchmark`, which measures it; give it one"
