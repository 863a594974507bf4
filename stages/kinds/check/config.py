"""Config and output of the input check, which runs before a refresh to find problems in later stages' inputs."""

from typing import ClassVar, Literal

from pydantic import Field

from stages.core.contract import StageConfig, StageInput
from stages.core.fields import StrictModel

FINDINGS_FILE = "findings.json"


class CheckConfig(StageConfig):
    """Config of the input check (output in `findings.json`), which runs like a stage, but no recipe names it."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("verdict",)

    kind: Literal["check"] = "check"
    stages: tuple[StageInput, ...] = Field(
        description="Stages whose inputs are checked; a model not built yet is checked by what it is trained from."
    )


class InputProblem(StrictModel):
    """Problem in a stage's input that the check found. field: dotted path. error: name of the error class."""

    stage: str
    field: str
    error: str
    message: str


class Unseen(StrictModel):
    """Input of a stage that the check had no time to look at; the stage itself will check it."""

    stage: str
    field: str
    message: str


class Findings(StrictModel):
    """Content of `findings.json`: problems in stage inputs, and inputs that were not checked."""

    problems: tuple[InputProblem, ...] = ()
    unseen: tuple[Unseen, ...] = ()
