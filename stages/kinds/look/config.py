"""Config of a look at data, a stage run for a stage whose turn has not come."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from stages.core.contract import StageConfig, StageInput

LOOK_FILE = "look.json"


class LookConfig(StageConfig):
    """Show the data that a stage will see (`DataLook` → `look.json`); run like a stage, but in no recipe."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("verdict",)

    kind: Literal["look"] = "look"
    stage: StageInput
    num_rows: PositiveInt
