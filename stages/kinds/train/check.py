"""Checks of a training stage's inputs before it runs: data, prompts, adapter, experts, teacher and named servers."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.adapters.config import AdapterConfig
from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, ModelError
from stages.data.any_rows import check_formats
from stages.data.files import portions
from stages.data.look import NullReporter, data_problems
from stages.data.prepare import prepare_mixture
from stages.kinds.train.blocks import MoeConfig
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.media import check_media
from stages.kinds.train.methods.rollouts import RolloutOptions
from stages.kinds.train.order import repeated_too_often
from stages.kinds.train.teacher import check_teacher
from stages.models.facts import ModelFacts
from stages.models.loading import Head, model_without_weights
from stages.models.processor_files import reads_media
from stages.rewards.judging import opening_problems
from stages.rewards.reward import RewardContext
from stages.rollouts.prompts import media_kinds


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Check a training stage against its inputs; yield problems by config field (text: what could not be checked)."""
    config = TrainConfig.model_validate(stage_input.config)
    with TemporaryDirectory() as room:
        try:
            models = InputModels.of(config, stage_input.inputs).as_started(config, Path(room), weights=False)
        except LifecycleError as error:
            yield "media" if config.media.named and not config.data.add_tokens else "data.add_tokens", error
            return
        yield from problems_of(config, stage_input, models)


def problems_of(
    config: TrainConfig, stage_input: StageInput, models: InputModels
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield a training stage's problems by config field; the models have the tokens that the recipe adds."""
    model_folder = models.start.folder
    if config.adapter:
        yield from adapter_problems(config, config.adapter, model_folder)
    if config.moe != MoeConfig() or config.engine_settings.replays_experts:
        yield from mixture_problems(config, model_folder)
    if config.mtp_loss_weight:
        yield from mtp_problems(config, model_folder)
    field = f"{config.method}.teacher_server" if config.teacher_server else "teacher"
    yield from ((field, error) for error in check_teacher(config, models))
    if config.sampling and config.sampling.server:
        from stages.kinds.train.rollouts.server import (
            external_server_problems,  # and torch, with what lies beneath it
        )

        field = f"{config.sampling_block}.server"
        yield from ((field, error) for error in external_server_problems(config, models.start))
    if config.rollouts:
        yield from rollout_problems(config, config.rollouts, stage_input, models.start)
        return
    data = config.data_from(stage_input.inputs[config.model])
    try:
        check_formats(stage_input.inputs, data, config.learning.rows)
    except LifecycleError as mixed:
        yield "data.datasets", mixed
        return
    is_sound = True
    for place, part in data.parts.items():
        folder = stage_input.inputs[part.dataset_stage] / "data"
        for field, error in data_problems(
            folder, part, models.start, rows=config.learning.rows, cache=stage_input.cache
        ):
            is_sound = False
            yield f"data.{place}{field}", error
    if is_sound and (data.datasets or config.on_policy):
        yield from prepared_problems(config.model_copy(update={"data": data}), stage_input, models.start)


def prepared_problems(
    config: TrainConfig, stage_input: StageInput, model: ModelFacts
) -> Iterator[tuple[str, LifecycleError]]:
    """Tokenize and pack the datasets as training would, and yield the problems that come up."""
    field = "data.datasets" if config.data.datasets else "data.dataset"
    with TemporaryDirectory() as work:
        try:
            prepared = prepare_mixture(
                stage_input.inputs,
                config.data,
                model,
                rows=config.learning.rows,
                cache=stage_input.cache,
                report=NullReporter(),
                work=Path(work),
            )
            if config.on_policy:
                from stages.kinds.train.rollouts.on_policy import check_prompts  # and torch, with what lies beneath it

                check_prompts(prepared.training)
        except LifecycleError as error:
            yield field, error
            return
    try:
        check_media(config, prepared.media_kinds)
    except LifecycleError as error:
        yield field, error
    yield from ((f"data.{field}", error) for field, error in repeated_too_often(config, prepared.training))


def rollout_problems(
    config: TrainConfig, options: RolloutOptions, stage_input: StageInput, model: ModelFacts
) -> Iterator[tuple[str, LifecycleError]]:
    """Try the rewards of a training stage and read every prompt of its dataset; yield the problems."""
    from stages.kinds.train.rollouts.documents import checked_prompts, turn_readers  # and torch

    context = RewardContext(stage_input.inputs, stage_input.cache, lambda _: None)
    found = opening_problems(options.rewards, context)
    yield from ((f"{config.method}.rewards.{name}", error) for name, error in found)
    are_open = True
    for part in config.acting.values():
        for error in part.options.environment.opening_problems() if part.options.environment else ():
            are_open = False
            yield f"{config.method}.{part.field}", error
    if not are_open:
        return  # their tools are part of the prompts
    data = config.data_from(stage_input.inputs[config.model])
    try:
        as_read = config.model_copy(update={"data": data})
        for portion in portions(data):
            prompts = checked_prompts(as_read, stage_input.inputs, model, portion=portion)
            check_media(config, media_kinds(prompts))
        turn_readers(as_read, model, prompts)
    except LifecycleError as error:
        yield "data", error


def mixture_problems(config: TrainConfig, model_folder: Path) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield reasons why the recipe's options for mixtures of experts do not fit the model's routers and experts."""
    from stages.engines.fsdp.expert_choices import ExpertChoices
    from stages.engines.fsdp.moe import check_mixture

    field = "moe"
    try:
        causal_lm = model_without_weights(model_folder, trust_remote_code=config.trust_remote_code)
        check_mixture(causal_lm, config.moe.settings)
        if config.engine_settings.replays_experts:
            field = f"{config.method}.replay_experts"
            ExpertChoices(causal_lm)
    except ModelError as error:
        yield field, error
    except Exception as error:  # whatever code that came with a model raises; training loads it otherwise
        yield field, f"a model without weights could not be made: {type(error).__name__}: {error}"


def mtp_problems(config: TrainConfig, model_folder: Path) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield the reason why the model's layer of multi-token prediction cannot be trained."""
    from stages.engines.fsdp.mtp import check_mtp

    try:
        check_mtp(model_folder, trust_remote_code=config.trust_remote_code)
    except ModelError as error:
        yield "mtp_loss_weight", error
    except Exception as error:  # whatever code that came with a model raises; training loads it otherwise
        yield "mtp_loss_weight", f"a model without weights could not be made: {type(error).__name__}: {error}"


def adapter_problems(
    config: TrainConfig, adapter: AdapterConfig, model_folder: Path
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield reasons why the recipe's `adapter` options do not fit the model, from its config and file headers."""
    # Torch and Transformers take seconds to import, and only adapters need them here.
    from stages.adapters.check import check_adapter

    sees = reads_media(model_folder)
    head: Head = "pictures" if sees else "tokens"
    try:
        causal_lm = model_without_weights(model_folder, trust_remote_code=config.trust_remote_code, head=head)
    except Exception as error:  # whatever code that came with a model raises; training loads it otherwise
        yield "adapter", f"a model without weights could not be made: {type(error).__name__}: {error}"
        return
    try:
        check_adapter(causal_lm, adapter, model_folder, sees=sees)
    except ModelError as error:
        yield "adapter", error
