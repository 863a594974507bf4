"""Registry of evaluation harnesses. To add a harness, write a package beside `lm_eval/` and add one line here."""

import difflib
from typing import Annotated

from pydantic import AfterValidator, Field

from stages.harnesses.acting.harness import ActingHarness
from stages.harnesses.bfcl.harness import Bfcl
from stages.harnesses.evalscope.harness import EvalScope
from stages.harnesses.harness import Evaluation, Harness
from stages.harnesses.judge.harness import Judge
from stages.harnesses.lm_eval.harness import LmEval

HARNESSES: dict[str, Harness] = {
    "lm_eval": LmEval(),
    "evalscope": EvalScope(),
    "judge": Judge(),
    "environment": ActingHarness(),
    "bfcl": Bfcl(),
}
DEFAULT_HARNESS = "lm_eval"


def _known(name: str) -> str:
    if name not in HARNESSES:
        close = difflib.get_close_matches(name, HARNESSES, n=1)
        meant = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(HARNESSES)}"
        raise ValueError(f"there is no harness {name!r}; {meant}")
    return name


HarnessName = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*HARNESSES]})]


def harness_of(evaluation: Evaluation) -> Harness:
    """Return the harness that an evaluation asks for."""
    return HARNESSES[evaluation.harness]
