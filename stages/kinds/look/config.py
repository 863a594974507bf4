"""Config of the look stage, which previews the data of another stage that has not run yet."""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from stages.core.contract import StageConfig, StageInput

LOOK_FILE = "look.json"


class LookConfig(StageConfig):
    """Config of the look stage, a preview of another stage's rows (`look.json`), which no recipe names."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("verdict",)

    kind: Literal["look"] = "look"
    stage: StageInput
    num_rows: PositiveInt
