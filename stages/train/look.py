"""What a training stage will see of its data."""

from __future__ import annotations

from pathlib import Path

from stages.core.contract import StageInput
from stages.core.errors import RecipeError
from stages.data.dataset import PackedDataset
from stages.data.look import Visits, look_at
from stages.data.shown import DataLook
from stages.train.config import TrainConfig
from stages.train.mixture import repeated_too_often, seen, slots_of, steps_of_epochs
from stages.train.start import data_with_template


def look(stage_input: StageInput, num_rows: int, scratch: Path) -> DataLook:
    """The rows of its first step, and counts. Raises what `prepare` raises."""
    config = TrainConfig.model_validate(stage_input.config)
    if config.rollouts:
        raise RecipeError(
            f"`method: {config.method}` learns from what the model will answer, so there are no rows to show yet; a "
            "stage of `kind: generate` shows prompts and answers"
        )

    def visits(training: PackedDataset) -> Visits:
        slots = slots_of(config.data, training, config.seed)
        num_slots = (config.steps or steps_of_epochs(config, training)) * config.global_batch_size
        metrics = seen(config.data, training, slots, num_slots)
        shares, epochs = (
            {name: metrics[f"{what}.{name}"] for name in training.members} for what in ("share_seen", "epochs")
        )
        problems = [str(error) for _, error in repeated_too_often(config, training)]
        return Visits(slots.rows(0, min(num_rows, len(training))), shares, epochs, problems)

    return look_at(
        stage_input.inputs,
        data_with_template(config.data, stage_input.inputs[config.model]),
        stage_input.inputs[config.base or config.model] / "model",
        rows=config.learning.rows,
        visits=visits,
        cache=stage_input.cache,
        scratch=scratch,
    )
