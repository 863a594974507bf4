"""What a check is given: stages whose turn has not come, with what there is of their inputs; and what it finds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.core.contract import StageConfig, StageInput
from stages.core.fields import Product
from stages.core.strict import StrictModel

FINDINGS_FILE = "findings.json"


class CheckConfig(StageConfig):
    """No stage of a recipe, but run like one: looks for what is wrong with the inputs of others (→ `findings.json`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["check"] = "check"
    stages: tuple[StageInput, ...] = Field(
        description="Instead of a model that is not made yet, they have the one that it will be made from."
    )

    @property
    def product(self) -> Product:
        return "verdict"


class InputProblem(StrictModel):
    """What is wrong with an input. field: dotted path in the stage's config. error: name of the error class."""

    stage: str
    field: str
    error: str
    message: str


class Unseen(StrictModel):
    """What of an input there was no time to look at; the stage itself will."""

    stage: str
    field: str
    message: str


class Findings(StrictModel):
    """The content of `findings.json`: what was found so far."""

    problems: tuple[InputProblem, ...] = ()
    unseen: tuple[Unseen, ...] = ()
