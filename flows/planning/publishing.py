"""Tokens without which a planned publication would fail at its end (reads the environment, asks nobody)."""

from __future__ import annotations

import os

from flows.planning.plan import Plan
from stages.core.errors import RecipeError
from stages.publish.config import PublishConfig
from stages.publish.targets.registry import parse_address, token_of


def check_publishing(plan: Plan) -> None:
    """Raises `RecipeError` for stages that will run here and whose environment lacks the token of their target.

    Nobody here knows the environment that a cluster gives them: the stage itself says so there.
    """
    problems = []
    for name, stage in plan.stages.items():
        config = stage.config
        if not isinstance(config, PublishConfig) or stage.action == "cached" or config.dry_run:
            continue
        variable = token_of(parse_address(config.to)) if config.execution.launcher == "local" else None
        if variable and not {**os.environ, **config.execution.environment}.get(variable):
            problems.append(
                f"stages.{name}.to: {config.to} is written to with a token, and the environment has no {variable}; "
                "set it, or say `dry_run: true`"
            )
    if problems:
        raise RecipeError("\n".join(problems))
