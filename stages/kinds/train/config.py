"""Config of a training stage: its fields, what follows from them, and the calls of its checks (`supported.py`).

The options of a method are in the method's module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from stages.adapters.config import AdapterConfig
from stages.core.contract import ModelOrAdapterReference, ModelReference, Reported, StageConfig, base_of
from stages.core.fields import AddedLater, NonNegativeFp32, Product, without
from stages.data.config import DataConfig
from stages.engines.settings import AdamSettings, EngineSettings, Fp8Recipe
from stages.kinds.train.blocks import (
    BatchSize,
    Denominator,
    Epochs,
    MoeConfig,
    OptimizerConfig,
    Rate,
    Seed,
    TrainExecution,
    TrainingPrecision,
)
from stages.kinds.train.methods.options import MethodFields, MethodName
from stages.kinds.train.start import start_problems
from stages.kinds.train.supported import (
    SamplingRun,
    completion_errors,
    contradiction,
    engine_errors,
    idle_fields,
    row_errors,
    score_head_errors,
)
from stages.parallel.device_types import missing_package
from stages.parallel.layout import AutoLayout, EngineName, Layout, LayoutOrAuto
from stages.parallel.legality import RunConstraints, layout_errors
from stages.planner.hardware import named_like
from stages.planner.workload import Workload

LAYOUT_PROBLEM = "layout"
"""Type of pydantic's validation errors about a layout."""


class TrainConfig(MethodFields):
    """Training of a model by one of the methods (→ `model/`); each method's options are in the field of its name.

    With `adapter:` the model is frozen and low-rank weights beside it learn (→ `adapter/`). A method of scores gives a
    reward model (→ `reward_model/`).
    """

    STAGE_VERSION: ClassVar[int] = 2
    PRODUCTS = ("model", "adapter", "reward_model")
    HAS_CHECK: ClassVar[bool] = True
    REPORTED = Reported(
        measured={
            "real_tokens_per_s": "tokens/s",
            "mfu": "MFU",
            "step_time_s": "s/step",
            "predicted_step_time_s": "predicted s/step",
            "peak_memory_gib": "peak GiB",
            "predicted_memory_gib": "predicted GiB",
        },
        counts_data=True,
        not_data=("data_wait_fraction", "communication_fraction", "pipeline_bubble_fraction"),
        curves=True,
    )
    LEARNS = True
    SPANS_NODES = True
    GPU_FOR_EACH_PROCESS = True
    LESS_MEMORY: ClassVar[str] = "lower layout.micro_batch_size or data.sequence_length, or say layout.recompute: full"

    kind: Literal["train"]
    method: MethodName = Field(description="Training method; its options are the field of its name.")
    model: ModelOrAdapterReference
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None, description="Stage of the base model, where `model` is an adapter; default: found through `model`."
    )
    adapter: Annotated[AdapterConfig | None, AddedLater()] = Field(
        None, description="Low-rank weights that learn beside the frozen model; default: the whole model learns."
    )
    data: DataConfig
    engine: EngineName = Field("fsdp", description="Training engine: PyTorch FSDP2 or Megatron-core.")
    layout: LayoutOrAuto = Field(
        Layout(), description="Parallel degrees and memory choices; auto: the planner's best for this machine."
    )

    steps: PositiveInt | None = Field(None, description="Optimizer steps; default: as many as `epochs` takes.")
    epochs: Epochs = Field(1.0, description="Passes over the training data.")
    global_batch_size: BatchSize = Field(
        description="Packed rows per optimizer step over all processes; with `method: grpo`, completions."
    )
    learning_rate: Rate = Field(description="Peak learning rate, reached after the warm-up.")
    optimizer: Annotated[OptimizerConfig, AddedLater()] = OptimizerConfig()
    moe: Annotated[MoeConfig, AddedLater()] = MoeConfig()
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate as a function of the step, after the warm-up."
    )
    warmup_steps: NonNegativeInt = Field(
        0,
        description="Steps of linear warm-up: step k of n has k/n of the full learning rate. (Transformers has "
        "(k - 1)/n, so that its first step learns nothing; later steps are equal.)",
    )
    min_learning_rate_fraction: NonNegativeFp32 = Field(
        0.0, le=1, description="Fraction of the learning rate at which cosine and linear end."
    )
    adam_beta1: NonNegativeFp32 = Field(0.9, lt=1, description="Decay of Adam's running mean of gradients.")
    adam_beta2: NonNegativeFp32 = Field(0.95, lt=1, description="Decay of Adam's running mean of squared gradients.")
    adam_epsilon: Denominator = Field(1e-8, description="Number added to Adam's denominator.")
    weight_decay: NonNegativeFp32 = Field(0.0, description="Decoupled weight decay, as in AdamW.")
    decay_norms_and_biases: bool = Field(
        False, description="Apply `weight_decay` to norms and biases too; Transformers and TRL do not."
    )
    max_grad_norm: Rate | None = Field(
        1.0, description="Gradient norm above which gradients are clipped; null: no clipping."
    )
    precision: TrainingPrecision = Field(
        "bf16",
        description="bf16: parameters and activations in bfloat16, reduction and master weights in fp32. fp8: the "
        "same, with matrix products in 8 bits, on GPUs, by torchao (fsdp) or Transformer Engine (megatron).",
    )
    fp8_recipe: Annotated[Fp8Recipe, AddedLater()] = Field(
        "tensorwise", description="Granularity of the scales in `precision: fp8`; rowwise: fsdp only."
    )
    keep: Annotated[Literal["last", "best"], AddedLater()] = Field(
        "last",
        description="Choice of the written weights: those of the last step, or of the evaluated step with the "
        "lowest held-out loss (`execution.evaluate_every_steps`, which is identity then).",
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Dtype of the written weights."
    )
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")
    seed: Seed = Field(0, description="Seed of the order of rows and of dropout.")
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
        """True if all steps take about the same time, so that the watchdog may learn it.

        Without packing, a step is as long as its longest row; a compiled one is slow whenever a new shape comes.
        """
        return self.data.packing and not self.layout.compile and not self.sampling

    @property
    def workload(self) -> Workload:
        """Work of this training as the planner compares layouts; without `steps`, total tokens are unknown."""
        workload = Workload(
            self.data.sequence_length,
            self._packed_rows,
            self.precision,
            self.learning.passes(self.method_options),
            scores_documents=self.learning.needs_score_head,
            adapter=self.adapter.for_planner if self.adapter else None,
            optimizer=self.optimizer.name,
            state_bytes=self.optimizer.for_planner,
            freezes_routers=self.moe.freeze_router,
        )
        return replace(workload, total_tokens=self.steps * workload.tokens_per_step) if self.steps else workload

    @property
    def _packed_rows(self) -> int:
        """Packed rows of one optimizer step; for completions, their longest length counts and prompts do not."""
        if self.rollouts is None:
            return self.global_batch_size
        tokens = self.global_batch_size * self.rollouts.max_completion_length
        together = self.layout.micro_batch_size * self.layout.data_parallel_size
        return math.ceil(tokens / self.data.sequence_length / together) * together

    @property
    def sampling_devices(self) -> int:
        """Devices of the server that samples, after those that train; on a CPU both share the cores."""
        return self.sampling.num_devices if self.sampling else 0

    @property
    def devices(self) -> int:
        return self.processes + self.sampling_devices

    def device_roles(self, variable: str, devices: Sequence[str]) -> str | None:
        if not self.sampling_devices:
            return None
        training = "1 device trains" if self.processes == 1 else f"{self.processes} devices train"
        sampling = "1 samples" if self.sampling_devices == 1 else f"{self.sampling_devices} sample"
        sentence = f"{training}, {sampling} completions"
        if not devices:
            return sentence
        own, others = (",".join(part) for part in (devices[: self.processes], devices[self.processes :]))
        return f"{sentence}: {variable} {own} and {others}"

    def missing_here(self, gpus: Sequence[str]) -> Iterator[str]:
        """Yield what a machine lacks for products in 8 bits; clusters are checked when the stage starts."""
        if self.precision != "fp8" or not self.execution.is_local:
            return
        if not gpus:
            yield "`precision: fp8` is for NVIDIA GPUs, and this machine has none; set `precision: bf16`"
        for name in gpus:
            hardware = named_like(name)
            if hardware and hardware.fp8_tflops is None:
                yield f"`precision: fp8`: {name} does not multiply in 8 bits; set `precision: bf16`"
        if missing := missing_package(self.engine, self.precision):
            yield missing

    @property
    def constraints(self) -> RunConstraints:
        """Constraints of batch and sequence that a layout must fit, besides the model's numbers."""
        return RunConstraints(self.execution.nodes, self.processes, self.data.sequence_length, self.global_batch_size)

    @property
    def engine_settings(self) -> EngineSettings:
        """Settings that an engine is built with."""
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
            muon=self.optimizer.muon,
            moe=self.moe.settings,
            low_precision=self.optimizer.low_precision,
            fp8_recipe=self.fp8_recipe,
        )

    def identity(self) -> dict[str, JsonValue]:
        """Return the identity: `decay_norms_and_biases` only where weights decay, the evaluations for `keep: best`."""
        identity = super().identity()
        if self.keep == "best":
            identity["evaluate_every_steps"] = self.execution.evaluate_every_steps
        return identity if self.weight_decay else without(identity, {"decay_norms_and_biases"})

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        is_adapter = stages[self.model].product == "adapter"
        return self.model_copy(update={"base": self.base or base_of(self.model, stages)}) if is_adapter else self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        for field, name in self.references().items():
            if stages[name].kind == "quantize":
                yield (
                    f"{field}: {name} is quantized, and quantized weights cannot be trained; expected the model that "
                    f"it is made from, {stages[name].references()['model']}"
                )
        yield from start_problems(self.model, self.base, self.adapter, stages)
        yield from self.data.problems_among(stages)

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        for block in ("data", "optimizer"):
            yield from ((f"{block}.{field}", why) for field, why in getattr(self, block).idle_fields())
        yield from idle_fields(self.method, self.sampling_block, self.rollouts, self.sampling, self.teacher_server)
        if self.learning.rows == "pairs":
            yield "data.turns", f"`method: {self.method}` learns from single answers"
        if self.precision != "fp8":
            yield "fp8_recipe", f"`precision: {self.precision}` has no products in 8 bits"
        if self.schedule == "constant":
            yield "min_learning_rate_fraction", "`schedule: constant` ends where it began"
        if not self.weight_decay:
            yield "decay_norms_and_biases", "`weight_decay` is 0"
        if self.adapter and self.adapter.init != "eva":
            yield "adapter.eva_rho", f"`adapter.init: {self.adapter.init}` gives all layers the same rank"
        if self.steps:
            yield "epochs", f"`steps: {self.steps}` says how long to train"
        if not self.data.holds_out:
            yield (
                "execution.evaluate_every_steps",
                "no rows are held out (`data.evaluation_split` or `data.evaluation_fraction`)",
            )

    def custom_code(self) -> tuple[str, ...]:
        rewards = self.rollouts.rewards if self.rollouts else {}
        own = ((name, reward.custom_code()) for name, reward in rewards.items())
        found = (f"{self.method}.rewards.{name}: {code}" for name, code in own if code)
        return (*super().custom_code(), *found)

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return the version of the serving engine that samples, if there is one."""
        return {**self.sampling.engine_version} if self.sampling else {}

    def progress_kept(self, scratch: Path) -> int:
        """Return the step of the latest checkpoint. A folder has this name once it is complete."""
        steps = (path.name.removeprefix("step-") for path in (scratch / "checkpoints").glob("step-*"))
        return max(map(int, steps), default=0)

    def resume_identity(self) -> dict[str, JsonValue]:
        """Return the identity without engine and layout: any engine and layout can load a checkpoint."""
        return {key: value for key, value in self.identity().items() if key not in ("engine", "layout")}

    @model_validator(mode="after")
    def _rows_suit_the_method(self) -> Self:
        if errors := "; ".join(row_errors(self.learning, self.data)):
            raise ValueError(errors)
        return self

    @model_validator(mode="after")
    def _numbers_go_together(self) -> Self:
        if problem := contradiction(self.steps, self.warmup_steps, self.learning_rate, self.weight_decay):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _best_is_chosen_among_several(self) -> Self:
        if self.keep == "best" and not (self.data.holds_out and self.execution.evaluate_every_steps):
            raise ValueError(
                "`keep: best` chooses by the held-out loss of several steps; name held-out rows "
                "(`data.evaluation_split` or `data.evaluation_fraction`) and `execution.evaluate_every_steps`"
            )
        return self

    @model_validator(mode="after")
    def _completions_can_be_sampled(self) -> Self:
        if self.sampling is None:
            return self
        run = SamplingRun(
            method=self.method,
            block=self.sampling_block,
            options=self.sampling,
            global_batch_size=self.global_batch_size,
            data=self.data,
            num_nodes=self.execution.nodes,
            engine=self.engine,
            adapter=self.adapter,
            needs_reference=self.needs_reference,
            teacher=self.teacher,
        )
        if errors := "; ".join(completion_errors(run)):
            raise ValueError(errors)
        return self

    @model_validator(mode="after")
    def _engine_supports_the_options(self) -> Self:
        options = self.precision, self.fp8_recipe, self.optimizer, self.moe, self.adapter
        errors = engine_errors(self.engine, self.layout, *options)
        if self.learning.needs_score_head:
            errors += score_head_errors(self.method, self.engine, self.adapter)
        if errors:
            raise ValueError("; ".join(errors))
        return self

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        is_given = not isinstance(self.layout, AutoLayout)
        if is_given and (errors := "; ".join(layout_errors(self.engine, self.layout, self.constraints))):
            raise PydanticCustomError(LAYOUT_PROBLEM, "{problems}", {"problems": errors})
        return self
