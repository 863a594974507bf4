"""Check of stage inputs before any training: finds data and task problems that stages would meet only hours later.

`check(stage_input)` in `stages/kinds/<kind>/check.py` yields dotted fields with errors, or texts about what it had no
time for.
"""

import importlib

from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically
from stages.kinds.check.config import FINDINGS_FILE, CheckConfig, Findings, InputProblem, Unseen
from stages.models.start_up import hide_unused_packages, import_tokenizers


def run(config: CheckConfig, context: StageContext) -> StageResult:
    """Check the inputs of all stages, and write every problem to `findings.json`; problems do not fail the check."""
    hide_unused_packages()
    import_tokenizers()  # most checks need only tokenizers, not models
    problems: list[InputProblem] = []
    unseen: list[Unseen] = []
    for number, stage in enumerate(config.stages):
        context.progress(number, len(config.stages), "stages", f"checking the inputs of {stage.name}")
        check = importlib.import_module(f"stages.kinds.{stage.kind}.check").check
        for field, finding in check(stage):
            if isinstance(finding, str):
                unseen.append(Unseen(stage=stage.name, field=field, message=finding))
            else:
                name = type(finding).__name__
                problems.append(InputProblem(stage=stage.name, field=field, error=name, message=str(finding)))
        # Written after each stage: if time runs out in the next one, these findings are kept.
        findings = Findings(problems=tuple(problems), unseen=tuple(unseen))
        write_atomically(context.work / FINDINGS_FILE, findings.model_dump_json(indent=2))
    return StageResult(metrics={"stages": len(config.stages), "problems": len(problems)})
