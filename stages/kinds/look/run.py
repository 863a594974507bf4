"""The look at a stage's data: a kind that reads data has `look(stage_input, num_rows, scratch)` in its `look.py`."""

from __future__ import annotations

import importlib

from stages.core.contract import StageContext, StageResult
from stages.core.files import write_atomically
from stages.kinds.look.config import LOOK_FILE, LookConfig
from stages.models.start_up import hide_unused_packages, import_tokenizers


def run(config: LookConfig, context: StageContext) -> StageResult:
    """Write the preview of a stage's data. Raises the errors of preparing the data."""
    hide_unused_packages()
    import_tokenizers()
    look = importlib.import_module(f"stages.kinds.{config.stage.kind}.look").look
    write_atomically(context.work / LOOK_FILE, look(config.stage, config.num_rows, context.scratch).model_dump_json())
    return StageResult()
