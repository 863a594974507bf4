"""Plans, refreshes and artifacts as text and as JSON. Needs no server: it reads the store and the records."""

from __future__ import annotations

from typing import Any

from flows.plan import Plan


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The object that `plan --json` prints."""
    stages = [
        {
            "name": stage.name,
            "kind": stage.kind,
            "version": stage.version,
            "action": stage.action,
            "reason": stage.reason,
            "differences": [
                {"field": difference.field, "old": difference.old, "new": difference.new}
                for difference in stage.differences
            ],
        }
        for stage in plan.stages.values()
    ]
    return {"recipe": plan.recipe, "stages": stages}


def plan_as_text(plan: Plan) -> str:
    """A line a stage, and how many will run."""
    width = max(len(name) for name in plan.stages)
    lines = [
        f"{stage.name:<{width}}  {stage.kind:<9} {stage.version}  {stage.action:<6}  {stage.reason}"
        for stage in plan.stages.values()
    ]
    will_run = sum(stage.action == "run" for stage in plan.stages.values())
    return "\n".join([*lines, f"{will_run} of {len(plan.stages)} stages will run"])
