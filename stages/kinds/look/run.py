"""Look stage: previews another stage's data with the function `look` of that stage's kind."""

import importlib

from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically
from stages.kinds.look.config import LOOK_FILE, LookConfig
from stages.models.start_up import hide_unused_packages, import_tokenizers


def run(config: LookConfig, context: StageContext) -> StageResult:
    """Write a preview of a stage's data to `look.json`. Raises the errors that preparing the data would raise."""
    hide_unused_packages()
    import_tokenizers()
    look = importlib.import_module(f"stages.kinds.{config.stage.kind}.look").look
    write_atomically(context.work / LOOK_FILE, look(config.stage, config.num_rows, context.scratch).model_dump_json())
    return StageResult()
