"""What harnesses install before they can score: said beforehand, since it takes minutes, the network and space."""

from __future__ import annotations

from collections.abc import Iterator

from flows.planning.plan import Plan
from stages.harnesses.registry import harness_of
from stages.kinds.evaluate.config import EvaluateConfig


def installation_notes(planned: Plan) -> Iterator[str]:
    """Of each evaluation that will run and whose harness is not there. Raises ResourceError where it cannot be made."""
    for name, stage in planned.stages.items():
        if stage.action != "run" or not isinstance(stage.config, EvaluateConfig):
            continue
        if missing := harness_of(stage.config.evaluation).to_install():
            yield f"{name}: {missing}"
