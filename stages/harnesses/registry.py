"""The harnesses there are. A new harness is a room beside `lm_eval/` and one line here."""

from __future__ import annotations

from stages.harnesses.harness import Harness
from stages.harnesses.lm_eval.harness import LmEval

HARNESSES: dict[str, Harness] = {"lm_eval": LmEval()}
DEFAULT_HARNESS = "lm_eval"


def default_harness() -> Harness:
    """The harness of every evaluation, since recipes name none."""
    return HARNESSES[DEFAULT_HARNESS]
