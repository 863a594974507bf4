"""The check of inputs: what stages would say of their data, tasks and templates hours later, said before any training.

Each kind looks for itself: `check(stage_input)` in `stages/<kind>/check.py` gives dotted fields and errors.
"""

from __future__ import annotations

import importlib

from stages.check.config import PROBLEMS, PROBLEMS_FILE, CheckConfig, InputProblem
from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically


def run(config: CheckConfig, context: StageContext) -> StageResult:
    """Write down every problem. That some are found is no failure of the check."""
    problems: list[InputProblem] = []
    for number, stage in enumerate(config.stages):
        context.progress(number, len(config.stages), "stages", f"checking the inputs of {stage.name}")
        check = importlib.import_module(f"stages.{stage.kind}.check").check
        problems += [
            InputProblem(stage=stage.name, field=field, error=type(error).__name__, message=str(error))
            for field, error in check(stage)
        ]
        # After each: what was found stays found when there is no time for the next.
        write_atomically(context.work / PROBLEMS_FILE, PROBLEMS.dump_json(tuple(problems), indent=2).decode())
    return StageResult(metrics={"stages": len(config.stages), "problems": len(problems)})
