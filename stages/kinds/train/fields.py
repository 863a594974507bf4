"""Config fields of a training stage, and values derived from them: workload, devices and engine settings.

`TrainConfig` adds the checks to them. The options of a method are in the method's module.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from stages.adapters.config import AdapterConfig
from stages.core.contract import ModelOrAdapterReference, ModelReference
from stages.core.fields import AddedLater, NonNegativeFp32, Product
from stages.data.config import DataConfig
from stages.engines.settings import (
    AdamSettings,
    EngineSettings,
    Fp8Recipe,
    LowPrecisionSettings,
    MediaSettings,
    MuonSettings,
)
from stages.kinds.train.blocks import (
    BatchSize,
    Denominator,
    Epochs,
    MoeConfig,
    OptimizerConfig,
    PartLearningRates,
    Rate,
    Seed,
    TrainExecution,
    TrainingPrecision,
)
from stages.kinds.train.methods.options import MethodFields, MethodName
from stages.kinds.train.methods.rollouts import Acting
from stages.models.media import TOWERS, ModelPart
from stages.models.picture_bounds import PictureBounds
from stages.models.shape import ModelShape
from stages.parallel.engines.rules import Feature
from stages.parallel.layout import AutoLayout, EngineName, Layout, LayoutOrAuto, RunConstraints
from stages.parallel.legality import refusals
from stages.planner.workload import ColocatedServer, RowMedia, Workload


class TrainFields(MethodFields):
    """Config fields of a training stage; `TrainConfig` adds the checks."""

    kind: Literal["train"]
    method: MethodName = Field(description="Training method; its options are in the field of the same name.")
    model: ModelOrAdapterReference
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None,
        description="Stage that provides the base model of an adapter `model`; default: the adapter's own base model.",
    )
    adapter: Annotated[AdapterConfig | None, AddedLater()] = Field(
        None,
        description="Low-rank adapter to train while the model stays frozen; default: none (all weights learn).",
    )
    data: DataConfig
    engine: EngineName = Field("fsdp", description="Training engine: PyTorch FSDP2 or Megatron-core.")
    layout: LayoutOrAuto = Field(
        Layout(),
        description="Parallel degrees and memory options; auto: the layout that the planner finds best here.",
    )

    steps: PositiveInt | None = Field(
        None, description="Number of optimizer steps; default: as many as `epochs` takes."
    )
    epochs: Epochs = Field(1.0, description="Passes over the training data, where `steps` is not set.")
    global_batch_size: BatchSize = Field(
        description="Packed rows per optimizer step, over all processes; with `method: grpo`, completions."
    )
    learning_rate: Rate = Field(description="Peak learning rate, reached after the warm-up.")
    optimizer: Annotated[OptimizerConfig, AddedLater()] = OptimizerConfig()
    moe: Annotated[MoeConfig, AddedLater()] = MoeConfig()
    mtp_loss_weight: Annotated[NonNegativeFp32, AddedLater()] = Field(
        0.0,
        description="Weight of the loss of the model's layer of multi-token prediction, by which servers guess tokens "
        "ahead: it is trained too, on the token after the next. 0: it is copied as it is. Only for whole models of "
        "`method: sft` with `engine: fsdp`.",
    )
    freeze: Annotated[tuple[ModelPart, ...], AddedLater()] = Field(
        (),
        description="Parts of a model that sees or hears which do not learn from rows with media: vision_tower, "
        "audio_tower, projector (also the merger of towers like Qwen's), language_model. Default: all learn.",
    )
    part_learning_rates: Annotated[PartLearningRates, AddedLater()] = PartLearningRates()
    media: Annotated[PictureBounds, AddedLater()] = PictureBounds()
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Shape of the learning rate over the steps after the warm-up."
    )
    warmup_steps: NonNegativeInt = Field(
        0,
        description="Steps of linear warm-up: step k of n has k/n of the full rate (Transformers: (k - 1)/n).",
    )
    min_learning_rate_fraction: NonNegativeFp32 = Field(
        0.0, le=1, description="Fraction of the peak learning rate at which the cosine and linear schedules end."
    )
    adam_beta1: NonNegativeFp32 = Field(0.9, lt=1, description="Adam's β1: decay of its running mean of gradients.")
    adam_beta2: NonNegativeFp32 = Field(
        0.95, lt=1, description="Adam's β2: decay of its running mean of squared gradients."
    )
    adam_epsilon: Denominator = Field(1e-8, description="Adam's ε: number added to the denominator of its update.")
    weight_decay: NonNegativeFp32 = Field(0.0, description="Decoupled weight decay, as in AdamW.")
    decay_norms_and_biases: bool = Field(
        False, description="Apply `weight_decay` to norm weights and biases too; Transformers and TRL do not."
    )
    max_grad_norm: Rate | None = Field(
        1.0, description="Gradient norm above which gradients are clipped; null: no clipping."
    )
    precision: TrainingPrecision = Field(
        "bf16",
        description="Number format. bf16: computation in bfloat16, gradient reduction and master weights in fp32. "
        "fp8: the same, with matrix products in 8 bits, on GPUs, by torchao (fsdp) or Transformer Engine "
        "(megatron).",
    )
    fp8_recipe: Annotated[Fp8Recipe, AddedLater()] = Field(
        "tensorwise",
        description="Granularity of the scales of 8-bit matrix products, with `precision: fp8`; rowwise: fsdp only.",
    )
    keep: Annotated[Literal["last", "best"], AddedLater()] = Field(
        "last",
        description="Weights to write: last, or those of the evaluated step with the lowest held-out loss (needs "
        "`execution.evaluate_every_steps`, which then is part of the cache key).",
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Dtype in which the trained weights are written."
    )
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")
    seed: Seed = Field(0, description="Seed of the order of training rows and of dropout.")
    execution: TrainExecution = TrainExecution()

    @property
    def product(self) -> Product:
        if self.learning.needs_score_head:
            return "reward_model"
        return "adapter" if self.adapter else "model"

    @property
    def own_chat_template(self) -> Path | None:
        return self.data.chat_template

    @property
    def processes(self) -> int:
        return self.execution.processes or max(1, self.layout.world_size // self.execution.nodes)

    @property
    def micro_batches_per_step(self) -> int:
        """Number of forward passes of one process in one optimizer step (gradient accumulation)."""
        return self.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)

    @property
    def has_even_steps(self) -> bool:
        """True if all training steps take about equally long, so that the watchdog can learn a time limit from them.

        Not without packing (rows differ in length), nor compiled (slow whenever a new shape comes).
        """
        return self._has_even_rows and not self.layout.compile

    @property
    def _replays_experts(self) -> bool:
        return self.rollouts is not None and self.rollouts.replay_experts

    @property
    def _has_even_rows(self) -> bool:
        return self.data.packing and not self.sampling

    @property
    def workload(self) -> Workload:
        """Training as the planner needs it to predict memory and step time; total tokens only where `steps` is set."""
        workload = Workload(
            self.data.sequence_length,
            self._packed_rows,
            self.precision,
            self.learning.passes(self.method_options),
            scores_documents=self.learning.needs_score_head,
            predicts_ahead=self.mtp_loss_weight > 0,
            adapter=self.adapter.for_planner if self.adapter else None,
            optimizer=self.optimizer.name,
            state_bytes=self.optimizer.for_planner,
            frozen=self.freeze,
            freezes_routers=self.moe.freeze_router,
            even_rows=self._has_even_rows,
            packs=bool(self.data.packing),
            replays_experts=self._replays_experts,
            # Until rows are prepared, each is planned for as if it had the most.
            media=tuple(RowMedia(most, most, part=part) for part in TOWERS) if (most := self.data.max_patches) else (),
        )
        return replace(workload, total_tokens=self.steps * workload.tokens_per_step) if self.steps else workload

    def features(self, shape: ModelShape | None = None) -> dict[Feature, str]:
        """Return the features that the training uses, as the recipe asks for them; see `Workload.features`."""
        used = self.workload.features(shape)
        if self.optimizer.in_fewer_bits:
            used["fewer_bits_adamw"] = f"`optimizer.{self.optimizer.in_fewer_bits[0]}`"
        if self.fp8_recipe != "tensorwise":
            used["rowwise_fp8"] = f"`fp8_recipe: {self.fp8_recipe}`"
        if self.teacher_server:
            used["teacher_server"] = f"`{self.method}.teacher_server`"
        if self.part_learning_rates.named and not self.freeze:
            used["frozen_parts"] = "`part_learning_rates`"
        return used

    def refusals(self, shape: ModelShape) -> list[str]:
        """Return an error for each reason why a model of this shape cannot be trained; of `layout: auto`, the base's.

        After those of the layout comes the nearest that works; see `stages.parallel.legality.refusals`.
        """
        adapter = self.workload.adapter
        of_base = [*adapter.base_errors(shape)] if adapter else []
        if isinstance(self.layout, AutoLayout):
            return of_base
        return [*of_base, *refusals(self.engine, self.layout, self.constraints, self.features(shape), shape)]

    @property
    def _packed_rows(self) -> int:
        """Number of packed rows in an optimizer step; for sampling from `max_completion_length`, without prompts."""
        if self.rollouts is None:
            return self.global_batch_size
        tokens = self.global_batch_size * self.rollouts.max_completion_length
        together = self.layout.micro_batch_size * self.layout.data_parallel_size
        return math.ceil(tokens / self.data.sequence_length / together) * together

    @property
    def acting(self) -> dict[str, Acting]:
        """Sampling in each environment, by its name, for methods that sample rounds; see `RolloutOptions.parts`."""
        return self.rollouts.parts(self.data) if self.rollouts else {}

    @property
    def sampling_devices(self) -> int:
        """Number of devices of the sampling server, besides those that train; on a CPU both share the cores."""
        return self.sampling.num_devices if self.sampling else 0

    @property
    def colocated_server(self) -> ColocatedServer | None:
        """Sampling server on the training's devices, as the planner needs it; None without one."""
        sampling = self.sampling
        if not (sampling and sampling.is_colocated):
            return None
        serving = sampling.serving
        return ColocatedServer(
            serving.tensor_parallel_size,
            4 if sampling.dtype(self.precision) == "float32" else 2,
            min(self.data.sequence_length, serving.max_model_len or self.data.sequence_length),
            serving.kv_cache_memory_gib,
            self.needs_reference,
        )

    @property
    def devices(self) -> int:
        return self.processes + self.sampling_devices

    @property
    def constraints(self) -> RunConstraints:
        """Limits that a parallel layout must fit: batch size, sequence length, numbers of nodes and processes."""
        return RunConstraints(self.execution.nodes, self.processes, self.data.sequence_length, self.global_batch_size)

    def data_from(self, start: Path) -> DataConfig:
        """Return the `data` config, with the chat template of the artifact `start` where it names none."""
        template = start / "adapter" / "chat_template.jinja"
        if self.data.chat_template or not template.is_file():
            return self.data
        return self.data.model_copy(update={"chat_template": template})

    @property
    def media_settings(self) -> MediaSettings:
        """Settings of the engine for rows with pictures."""
        ratios = {part: rate / self.learning_rate for part, rate in self.part_learning_rates.named.items()}
        return MediaSettings(self.freeze, ratios)

    @property
    def engine_settings(self) -> EngineSettings:
        of_optimizer = self.optimizer.settings
        return EngineSettings(
            layout=self.layout,
            precision=self.precision,
            adam=AdamSettings(
                learning_rate=self.learning_rate,
                beta1=self.adam_beta1,
                beta2=self.adam_beta2,
                epsilon=self.adam_epsilon,
                weight_decay=self.weight_decay,
                decay_norms_and_biases=self.decay_norms_and_biases,
            ),
            seed=self.seed,
            hang_timeout_s=self.execution.hang_timeout_s,
            trust_remote_code=self.trust_remote_code,
            adapter=self.adapter,
            has_score_head=self.learning.needs_score_head,
            muon=of_optimizer if isinstance(of_optimizer, MuonSettings) else None,
            moe=self.moe.settings,
            low_precision=of_optimizer if isinstance(of_optimizer, LowPrecisionSettings) else LowPrecisionSettings(),
            fp8_recipe=self.fp8_recipe,
            mtp_loss_weight=self.mtp_loss_weight,
            replays_experts=self._replays_experts,
        )
