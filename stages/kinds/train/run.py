"""The train stage: from a model and a dataset to a trained model in `model/`, with its metrics and its loss curve."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages.adapters.adapter import Adapter
from stages.adapters.files import NUM_NAMED, read_adapter
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageContext, StageResult, is_main_process
from stages.core.errors import LayoutError, ModelError, ResourceError
from stages.core.files import write_atomically
from stages.data.batch import Batch
from stages.data.config import DEFAULT_DATE
from stages.data.summaries import LENGTHS_FILE
from stages.engines.engine import Engine, LossMeans
from stages.engines.recorded import record_log_probabilities
from stages.engines.registry import BUILDERS, EngineInputs
from stages.kinds.train.batches import TrainingData
from stages.kinds.train.check_model import InputModels, check_layout_on_device, check_lengths, check_model
from stages.kinds.train.checkpoints import Checkpoints, check_free_disk
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.exported import check_exported
from stages.kinds.train.journal import Journal, plot_loss
from stages.kinds.train.loop import TrainingRun, evaluation_metrics, train
from stages.kinds.train.media import digest_of, numbers_of, write_list
from stages.kinds.train.metrics import forget_peak_memory, peak_memory
from stages.kinds.train.out_of_memory import explained_out_of_memory
from stages.kinds.train.prediction import Prediction, predict_run
from stages.kinds.train.rows import RowData
from stages.kinds.train.teacher import check_teacher
from stages.kinds.train.watchdog import Watchdog
from stages.models.facts import ModelFacts
from stages.models.flops import ModelFlops
from stages.models.loading import Head, check_tokenizer, model_without_weights
from stages.models.model_folder import check_model_folder
from stages.models.recorded import note_trained_on
from stages.models.shape import ModelShape
from stages.models.start_up import start_training_quickly
from stages.parallel.accelerator import check_precision, compute_deterministically, type_at_hand
from stages.parallel.compiler import missing_compiler
from stages.parallel.cpu_products import multiply_by_onednn
from stages.parallel.device_types import DeviceType, check_device
from stages.parallel.devices import device_peak
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import describe_layout
from stages.parallel.processes import collective_timeout, joined_processes
from stages.planner.time import training_flops
from stages.planner.workload import Workload

if TYPE_CHECKING:
    from stages.adapters.effect import Changing

LOSS_PLOT = "plots/loss.png"

prepare_process = start_training_quickly
"""Preparation by `python -m stages`: libraries load faster, but models no longer by `device_map`."""


def run(config: TrainConfig, context: StageContext) -> StageResult:
    """Run a training: check machine, model and data, train, export, and return metrics.

    Raises a `LifecycleError` when they do not allow it, or training diverges.
    """
    models = InputModels.of(config, context.inputs)
    config = config.model_copy(update={"data": config.data_from(context.inputs[config.model])})
    models = models.as_started(config, context.scratch)
    device_type = _check_machine(config)
    for unusual in [*check_model_folder(models.start), *check_tokenizer(models.start)]:
        context.warn(unusual)
    shape = check_model(config, context, models.start)
    if shape:
        check_layout_on_device(config, device_type.torch_type, shape)
    for problem in check_teacher(config, models):
        raise problem
    if config.sampling and config.sampling.server:
        from stages.kinds.train.rollouts.server import external_server_problems  # and aiohttp

        for problem in external_server_problems(config, models.start, context):
            raise problem
    data = _read_data(config, context, models)
    check_lengths(data.longest_document, context, models.start)
    with joined_processes(collective_timeout(config.execution.hang_timeout_s)) as device:
        workload = replace(config.workload, media=data.row_media)
        prediction = predict_run(config, context, shape, models.teacher, device, workload=workload)
        config = config.model_copy(update={"layout": prediction.layout})
        with (
            explained_out_of_memory(config, prediction.metrics.get("predicted_memory_gib")),
            Watchdog(
                context.work, config.execution.hang_timeout_s, learns_step_times=config.has_even_steps
            ) as watchdog,
            ExitStack() as teacher_lifetime,
        ):
            # The teacher comes first: it is freed before the model that learns is loaded, unless it is asked all along.
            data = data.with_teacher(
                lambda other, model: _build_engine(other, context, model, device, data),
                watchdog,
                teacher_lifetime,
            )
            engine = _build_engine(config, context, models.start, device, data)
            engine.flops = _flops(engine, shape, workload)
            forget_peak_memory(device)
            with closing(_assemble(config, context, engine, data, watchdog)) as training_run:
                evaluation = train(training_run)
                measured_at_end = peak_memory(engine.device, every_rank=True) | training_run.positions.metrics(engine)
                if context.trial is None:
                    watchdog.begins("writing the model")
                    measured_at_end |= _write(training_run, data, context, models.start.folder)
    if is_main_process() and context.trial is None:
        compute_dtype = str(engine.compute_dtype).removeprefix("torch.")
        measured_at_end |= check_exported(config, context, models.start.folder, compute_dtype)
        _note_use(config, data, context.work / config.product)
        if not plot_loss(training_run.journal.rows, context.work / LOSS_PLOT):
            context.warn(f"Matplotlib is not installed here, so {LOSS_PLOT} was not drawn")
        write_list(data.media, context.work)
        if data.lengths:
            write_atomically(context.work / LENGTHS_FILE, data.lengths.model_dump_json())
    plots = [LOSS_PLOT] if (context.work / LOSS_PLOT).exists() else []
    return _result(training_run, data, evaluation, measured_at_end=measured_at_end, prediction=prediction, plots=plots)


def _check_machine(config: TrainConfig) -> DeviceType:
    """Check that the layout's processes were started and devices support engine and precision; return their kind."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.layout.world_size:
        layout = describe_layout(config.engine, config.layout)
        raise LayoutError(
            f"the layout needs {config.layout.world_size} processes ({layout}), {started} were started; start as many, "
            "or change the layout"
        )
    accelerator = type_at_hand()
    check_device(accelerator, config.engine, config.layout, config.precision)
    check_precision(accelerator, config.precision)
    if missing := RULES[config.engine].missing_package(config.precision):
        raise ResourceError(missing)
    if config.layout.compile and (missing := missing_compiler(accelerator.torch_type != "cpu")):
        raise ResourceError(missing)
    if config.execution.deterministic:
        compute_deterministically()
    if accelerator.torch_type == "cpu" and config.precision == "fp32":
        multiply_by_onednn()
    # A variable that is set already wins over the engine's.
    os.environ |= {**RULES[config.engine].environment(accelerator.torch_type, config.layout), **os.environ}
    return accelerator


def _read_data(config: TrainConfig, context: StageContext, models: InputModels) -> TrainingData:
    if config.rollouts is None:
        return RowData.read(config, context, models)
    from stages.kinds.train.rollouts.batches import RolloutData

    build_reference = partial(_build_engine, config, context, models.start)
    return RolloutData.read(config, context, config.rollouts, models.start, build_reference)


def _build_engine(
    config: TrainConfig,
    context: StageContext,
    model: ModelFacts,
    device: torch.device,
    data: TrainingData,
) -> Engine:
    """Build the configured training engine; only the libraries of this engine are imported."""

    def first_batches(num_tokens: int) -> Sequence[Batch]:
        if not isinstance(data, RowData):
            raise ModelError(f"adapter.init is eva, and `method: {config.method}` has no rows that it could start from")
        return data.first_batches(num_tokens)

    start = context.inputs[config.model] / "adapter" if config.base else None
    settings, scratch = config.engine_settings, context.scratch
    if data.has_media:
        kinds = data.media_kinds if isinstance(data, RowData) else ("image",)
        settings = replace(settings, media=replace(config.media_settings, kinds=kinds))
    return BUILDERS[config.engine](
        EngineInputs(model, settings, device, start, first_batches, scratch, context.milestone)
    )


def _flops(engine: Engine, shape: ModelShape | None, workload: Workload) -> ModelFlops:
    """Return the sizes that decide the FLOPs of training: those of a walk where one has measured the model."""
    return training_flops(shape, workload) if shape and shape.kinds else engine.flops


def _assemble(
    config: TrainConfig, context: StageContext, engine: Engine, data: TrainingData, watchdog: Watchdog
) -> TrainingRun:
    trial = context.trial
    checkpoints_folder = context.scratch / "checkpoints"
    if is_main_process() and trial is None:
        # one more than are kept: the newest is written before the oldest is removed
        num_files = config.execution.checkpoints_kept + 1 + (config.keep == "best")
        check_free_disk(context.scratch, num_files * engine.checkpoint_bytes, f"{num_files} checkpoints")
    num_steps = _num_steps(config, context, data)
    last_step = trial.steps if trial else num_steps
    measures_peak = engine.device.type != "cpu" or config.execution.measure_matmul_rate
    return TrainingRun(
        config=config,
        engine=engine,
        loss=config.learning.build_loss(config.method_options),
        batches=data.batches(engine, last_step, watchdog),
        num_steps=max(num_steps, last_step),
        checkpoints=Checkpoints(checkpoints_folder, engine, config.execution.checkpoints_kept),
        journal=Journal(context, last_step, 1 if trial else config.execution.log_every_steps),
        peak=device_peak(engine.device, engine.compute_dtype) if measures_peak else None,
        watchdog=watchdog,
        trial=trial,
    )


def _num_steps(config: TrainConfig, context: StageContext, data: TrainingData) -> int:
    num_steps = config.steps or data.steps_of_epochs
    if config.warmup_steps > num_steps:
        context.warn(
            f"warmup_steps {config.warmup_steps} is more than the {num_steps} steps: learning_rate is not reached"
        )
    return num_steps


def _write(training_run: TrainingRun, data: TrainingData, context: StageContext, base: Path) -> dict[str, float]:
    """Export the trained model, and log-probabilities of a few documents that later stages must reproduce.

    Returns metrics of how far these moved. base: an adapter's model folder. A useless adapter is written, then refused.
    """
    config, engine = training_run.config, training_run.engine
    for problem in engine.export(context.work / config.product, getattr(torch, config.export_dtype)):
        context.refuse(problem)
    change: dict[str, float] = {}
    if not config.learning.needs_score_head:
        change = record_log_probabilities(engine, training_run.batches.recorded(), context.work, data.tool_prompts)
    if config.adapter and is_main_process():
        try:
            _judge_adapter(config, context, base, "pictures" if data.has_media else "tokens")
        except ModelError as error:
            context.refuse(error)
    return change


def _judge_adapter(config: TrainConfig, context: StageContext, base: Path, head: Head) -> None:
    """Reject a trained adapter that changes no weight when merged; warn of layers and experts that learned nothing."""
    # Not at the top: they import what Transformers loads models with, before `start_training_quickly` makes that light.
    from stages.adapters.effect import has_effect, idle_experts, idle_layers

    start = read_adapter(context.inputs[config.model] / ADAPTER_FOLDER) if config.base else None
    adapter = read_adapter(context.work / config.product)
    if idle := idle_layers(adapter):
        context.warn(
            f"{len(idle)} of {len(adapter.layers)} adapted layers have learned nothing, their B is 0 "
            f"({', '.join(idle[:NUM_NAMED])}); leave them out of adapter.target_modules, or raise learning_rate or the "
            "steps"
        )
    if unusual := idle_experts(adapter):
        context.warn(unusual)
    changes = _changing(adapter, config, base, head)
    before = "with the adapter that training started from" if start else "without the adapter"
    if not has_effect(changes, _changing(start, config, base, head) if start else {}, base):
        context.refuse(
            ModelError(
                f"the adapter does nothing: once it is merged into {base.parent.name}, no element of {len(changes)} "
                f"weights is another number, in the dtype of its file, than {before}; raise learning_rate, the steps "
                "or adapter.alpha"
            )
        )


def _changing(adapter: Adapter, config: TrainConfig, base: Path, head: Head) -> Changing:
    from stages.adapters.effect import changing

    if not adapter.parameters and head == "tokens":
        return changing(adapter)
    return changing(adapter, model_without_weights(base, trust_remote_code=config.trust_remote_code, head=head))


def _note_use(config: TrainConfig, data: TrainingData, folder: Path) -> None:
    """Record in the trained model's folder what it learned from, chats and media, and its chat template and date."""
    own_date = config.data.template_date if config.data.template_date != DEFAULT_DATE else None
    media = data.media_kinds if isinstance(data, RowData) else ()
    note_trained_on(folder, conversations=data.conversations, template_date=own_date, media=media)
    if config.data.chat_template:
        shutil.copyfile(config.data.chat_template, folder / "chat_template.jinja")


def _result(
    training_run: TrainingRun,
    data: TrainingData,
    evaluation: LossMeans | None,
    *,
    measured_at_end: dict[str, float],
    prediction: Prediction,
    plots: Sequence[str],
) -> StageResult:
    config, engine, peak = training_run.config, training_run.engine, training_run.peak
    held_out = evaluation_metrics(evaluation) if evaluation else {}
    tags = {
        "engine": config.engine,
        "layout": describe_layout(config.engine, config.layout),
        "device": engine.device.type,
        **engine.tags,
        **prediction.tags,
        **digest_of(data.media),
    }
    if peak:
        tags |= {
            "device_name": peak.device_name,
            "peak": f"{peak.flops_per_s / 1e12:.3g} TFLOP/s a device, {peak.source}",
        }
    metrics = {**training_run.journal.summary(), **measured_at_end, **prediction.metrics, **held_out, **data.counts}
    metrics |= numbers_of(data.media)
    headline = (
        "evaluation_loss",
        *(f"evaluation_{name}" for name in config.learning.headline),
        "reward",
        "real_tokens_per_s",
        "mfu",
    )
    first = {name: metrics[name] for name in headline if name in metrics}
    files = [] if training_run.trial else [*plots, *training_run.batches.files]
    return StageResult(metrics={**first, **metrics}, tags=tags, files=files)
