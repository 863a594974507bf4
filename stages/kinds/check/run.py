"""The check of inputs: what stages would say of their data, tasks and templates hours later, said before any training.

Each kind looks for itself: `check(stage_input)` in `stages/kinds/<kind>/check.py` gives dotted fields and errors, or
instead of an error, as text, what there was no time to look at.
"""

from __future__ import annotations

import importlib

from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically
from stages.kinds.check.config import FINDINGS_FILE, CheckConfig, Findings, InputProblem, Unseen
from stages.models.start_up import hide_unused_packages, import_tokenizers


def run(config: CheckConfig, context: StageContext) -> StageResult:
    """Write down every problem. That some are found is no failure of the check."""
    hide_unused_packages()
    import_tokenizers()  # models are made for few stages
    problems: list[InputProblem] = []
    unseen: list[Unseen] = []
    for number, stage in enumerate(config.stages):
        context.progress(number, len(config.stages), "stages", f"checking the inputs of {stage.name}")
        check = importlib.import_module(f"stages.kinds.{stage.kind}.check").check
        for field, found in check(stage):
            if isinstance(found, str):
                unseen.append(Unseen(stage=stage.name, field=field, message=found))
            else:
                name = type(found).__name__
                problems.append(InputProblem(stage=stage.name, field=field, error=name, message=str(found)))
        # After each: what was found stays found when there is no time for the next.
        findings = Findings(problems=tuple(problems), unseen=tuple(unseen))
        write_atomically(context.work / FINDINGS_FILE, findings.model_dump_json(indent=2))
    return StageResult(metrics={"stages": len(config.stages), "problems": len(problems)})
