"""Places that a planned publication cannot write to, and tokens that it lacks, found before anything runs.

Reads the environment and looks at folders of this machine; asks no server.
"""

from __future__ import annotations

import os
from pathlib import Path

from flows.ledger.home import store_root
from flows.planning.plan import Plan
from stages.core.errors import PublishError, RecipeError
from stages.kinds.publish.config import PublishConfig
from stages.kinds.publish.targets.folder import Folder, check_outside
from stages.kinds.publish.targets.registry import parse_address, token_of


def check_publishing(plan: Plan) -> None:
    """Raise `RecipeError` for stages that will run and whose target cannot take what they publish.

    Of a stage that a cluster runs, only the store is looked at, which it shares: its environment and its other folders
    are not known here, and the stage itself checks them there.
    """
    problems = []
    for name, stage in plan.stages.items():
        config = stage.config
        if isinstance(config, PublishConfig) and stage.action != "cached" and (problem := _problem(config)):
            problems.append(f"stages.{name}.to: {problem}")
    if problems:
        raise RecipeError("\n".join(problems))


def _problem(config: PublishConfig) -> str | None:
    address, is_local = parse_address(config.to), config.execution.launcher == "local"
    if address.scheme == "file":
        try:
            check_outside(Path(address.place), store_root())
            if is_local and not config.dry_run:
                Folder(Path(address.place)).check()
        except PublishError as error:
            return str(error)
    variable = token_of(address) if is_local and not config.dry_run else None
    if variable and not {**os.environ, **config.execution.environment}.get(variable):
        return (
            f"{config.to} is written to with a token, and the environment has no {variable}; set it, or say "
            "`dry_run: true`"
        )
    return None
