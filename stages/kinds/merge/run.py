"""The merge stage: a model and adapters → the model with B A added to its weights."""

from __future__ import annotations

from stages.core.contract import StageContext, StageResult
from stages.kinds.merge.config import MergeConfig
from stages.models.start_up import hide_unused_packages


def run(config: MergeConfig, context: StageContext) -> StageResult:
    """Merge adapters into a model, and compare with training's record. Raises ModelError for unfitting files."""
    hide_unused_packages()
    from stages.kinds.merge.merging import merge  # and Transformers' models

    return merge(config, context)
