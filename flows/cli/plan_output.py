"""Output of `lifecycle plan` as text and JSON."""

from typing import Any

from flows.planning.plan import Plan
from stages.core.redaction import redact


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as the object that `lifecycle plan --json` prints."""
    stages = [
        {
            "name": stage.name,
            "kind": stage.kind,
            "version": None if stage.name in plan.unknown else stage.version,
            "action": stage.action,
            "reason": plan.unknown.get(stage.name, stage.reason),
            "base": plan.base_of(stage.name),
            "custom_code": list(stage.config.custom_code()),
            "differences": [
                {"field": difference.field, "old": difference.old, "new": difference.new}
                for difference in stage.differences
            ],
        }
        for stage in plan.stages.values()
    ]
    return {"recipe": plan.recipe, "stages": stages}


def without_secrets(value: Any) -> Any:
    """Return a JSON value in which secrets, such as API keys, are masked in all strings; field names are kept."""
    if isinstance(value, dict):
        return {name: without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def plan_as_text(plan: Plan) -> str:
    """Return a plan as text: a line for each stage with `run` or `cached` and the reason, then how many will run."""
    width = max(len(name) for name in plan.stages)
    lines = [
        f"{stage.name:<{width}}  {stage.kind:<9} "
        f"{'unknown     ' if stage.name in plan.unknown else stage.version}  {stage.action:<6}  "
        f"{plan.unknown.get(stage.name, stage.reason)}"
        for stage in plan.stages.values()
    ]
    lines += [
        f"{stage.name} runs code from outside: {code}"
        for stage in plan.stages.values()
        for code in stage.config.custom_code()
    ]
    lines += [f"{name} is an adapter of {base}" for name in plan.stages if (base := plan.base_of(name))]
    will_run = sum(stage.action == "run" for stage in plan.stages.values())
    return "\n".join([*lines, f"{will_run} of {len(plan.stages)} stages will run"])
