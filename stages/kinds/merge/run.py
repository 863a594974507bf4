"""The merge stage: a model and adapters → the model with B A added to its weights."""

from __future__ import annotations

from stages.core.contract import StageContext, StageResult
from stages.kinds.merge.config import MergeConfig
from stages.models.start_up import hide_unused_packages


def run(config: MergeConfig, context: StageContext) -> StageResult:
    """Merge, and compare with what training recorded. Raises ModelError for files that do not belong together."""
    hide_unused_packages()
    from stages.kinds.merge.merging import merge  # and Transformers' models

    return merge(config, context)
