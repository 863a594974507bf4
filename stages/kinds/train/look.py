"""Preview of a training stage's data for `lifecycle look`."""

from pathlib import Path

from stages.core.contract import StageInput
from stages.data.dataset import PackedDataset
from stages.data.look import Visits, look_at
from stages.data.summaries import DataLook
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.order import repeated_too_often, seen, slots_of, steps_of_epochs
from stages.kinds.train.rollouts.documents import checked_prompts
from stages.rollouts.look import look_at_prompts


def look(stage_input: StageInput, num_rows: int, scratch: Path) -> DataLook:
    """Return the dataset rows, or for a method that samples the prompts, that training sees first, with counts.

    Raises as `prepare_mixture` and `checked_prompts` do.
    """
    config = TrainConfig.model_validate(stage_input.config)
    model = InputModels.of(config, stage_input.inputs).as_started(config, scratch, weights=False).start
    if config.rollouts:
        return look_at_prompts(checked_prompts(config, stage_input.inputs, model), model.folder, num_rows)

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
        config.data_from(stage_input.inputs[config.model]),
        model,
        rows=config.learning.rows,
        visits=visits,
        cache=stage_input.cache,
        scratch=scratch,
    )
