"""What a look at data is given: a stage whose turn has not come, with the inputs that there are."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from stages.core.contract import StageConfig, StageInput
from stages.core.fields import Product

LOOK_FILE = "look.json"


class LookConfig(StageConfig):
    """No stage of a recipe, but run like one: what a stage will see of its data (`DataLook` → `look.json`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["look"] = "look"
    stage: StageInput
    num_rows: PositiveInt

    @property
    def product(self) -> Product:
        return "verdict"
