"""Config and findings of the check of inputs, a stage run for stages whose turn has not come."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.core.contract import StageConfig, StageInput
from stages.core.fields import StrictModel

FINDINGS_FILE = "findings.json"


class CheckConfig(StageConfig):
    """Look for problems in the inputs of other stages (→ `findings.json`); run like a stage, but in no recipe."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("verdict",)

    kind: Literal["check"] = "check"
    stages: tuple[StageInput, ...] = Field(
        description="Stages to check. Instead of a model that is not made yet, they get the one it will be made from."
    )


class InputProblem(StrictModel):
    """Problem of a stage's input, found before training.

    field: dotted path in the stage's config.
    error: name of the error class.
    """

    stage: str
    field: str
    error: str
    message: str


class Unseen(StrictModel):
    """Input that there was no time to check; the stage itself will."""

    stage: str
    field: str
    message: str


class Findings(StrictModel):
    """Content of `findings.json`: problems found so far."""

    problems: tuple[InputProblem, ...] = ()
    unseen: tuple[Unseen, ...] = ()
