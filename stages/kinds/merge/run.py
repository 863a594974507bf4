"""Merge stage: adds LoRA adapters to the weights of their base model."""

from stages.core.contract import StageContext, StageResult
from stages.kinds.merge.config import MergeConfig
from stages.models.start_up import hide_unused_packages


def run(config: MergeConfig, context: StageContext) -> StageResult:
    """Run the merge stage; raise ModelError for files that do not fit together."""
    hide_unused_packages()
    from stages.kinds.merge.merging import merge  # and Transformers' models

    return merge(config, context)
