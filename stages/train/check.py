"""What is wrong with a training stage's data, adapter and teacher, before the model that it starts from is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stages.adapters.config import AdapterConfig
from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, ModelError
from stages.data.check import data_problems
from stages.rewards.reward import RewardContext
from stages.train.check_teacher import teacher_problems
from stages.train.config import TrainConfig
from stages.train.methods.rollouts import RolloutOptions
from stages.train.start import data_with_template


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Dotted field and error: what an adapter goes on, the teacher's tokens, splits, format, every row, chat template,
    sequence length; or what was not looked at."""
    config = TrainConfig.model_validate(stage_input.config)
    model_folder = stage_input.inputs[config.base or config.model] / "model"
    if config.adapter:
        yield from adapter_problems(config, config.adapter, model_folder)
    if config.teacher and config.teacher_tokens:
        trusted = config.trust_remote_code
        teacher = stage_input.inputs[config.teacher] / "model"
        found = teacher_problems(config.teacher_tokens, teacher, model_folder, trust_remote_code=trusted)
        yield from (("teacher", error) for error in found)
    if config.rollouts:
        yield from rollout_problems(config, config.rollouts, stage_input, model_folder)
        return
    problems = data_problems(
        stage_input.inputs[config.data.dataset] / "data",
        data_with_template(config.data, stage_input.inputs[config.model]),
        model_folder,
        rows=config.learning.rows,
        cache=stage_input.cache,
    )
    yield from ((f"data.{field}", error) for field, error in problems)


def rollout_problems(
    config: TrainConfig, options: RolloutOptions, stage_input: StageInput, model_folder: Path
) -> Iterator[tuple[str, LifecycleError]]:
    """Of the rewards, and of every prompt."""
    from stages.train.rollouts.prompts import checked_prompts  # and torch, with what lies beneath it

    context = RewardContext(stage_input.inputs, stage_input.cache, lambda _: None)
    for name, reward in options.rewards.items():
        try:
            with reward.opened(name, context):
                pass
        except LifecycleError as error:
            yield f"{config.method}.rewards.{name}", error
    data = data_with_template(config.data, stage_input.inputs[config.model])
    try:
        folder = stage_input.inputs[data.dataset] / "data"
        checked_prompts(config.model_copy(update={"data": data}), options, folder, model_folder)
    except LifecycleError as error:
        yield "data", error


def adapter_problems(
    config: TrainConfig, adapter: AdapterConfig, model_folder: Path
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Of the model that will be trained, by the config and the files' headers of one that has the same."""
    # Torch and Transformers take seconds to import, and only adapters need them here.
    from stages.adapters.check import check_adapter, model_without_weights

    try:
        causal_lm = model_without_weights(model_folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever code that came with a model raises; training loads it otherwise
        yield "adapter", f"a model without weights could not be made: {type(error).__name__}: {error}"
        return
    try:
        check_adapter(causal_lm, adapter, model_folder)
    except ModelError as error:
        yield "adapter", error
