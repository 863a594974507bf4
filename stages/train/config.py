"""What a recipe may say of a training stage."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stages.core.contract import Execution, ModelReference, Product, StageConfig, StrictModel
from stages.data.config import DataConfig
from stages.parallel.layout import AutoLayout, Layout
from stages.parallel.legality import Setting, layout_problems

LAYOUT_PROBLEM = "layout"
"""Type of the validation errors that tell of a layout."""


class DpoConfig(StrictModel):
    """Direct preference optimization (Rafailov et al. 2023; IPO: Azar et al. 2023; hinge: Zhao et al. 2023)."""

    beta: PositiveFloat = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)


class TrainExecution(Execution):
    """Where a training stage runs, how often it logs, evaluates and saves."""

    processes: PositiveInt | None = Field(None, description="Processes on each node; default: what the layout needs.")
    log_every_steps: PositiveInt = Field(1, description="Steps between two points of the curves in MLflow.")
    evaluate_every_steps: PositiveInt | None = Field(None, description="Default: only at the end.")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="Default: ten times in a run.")
    checkpoints_kept: PositiveInt = Field(2, description="Older ones are removed.")
    hang_timeout_s: PositiveFloat = Field(
        3600,
        description="A step that takes longer, with what is saved and evaluated after it, ends the attempt; so does a "
        "micro-batch of DPO's reference, and reading or writing the model.",
    )
    measure_matmul_rate: bool = Field(True, description="On a CPU, measure the peak that MFU is relative to.")


def _auto_or_layout(value: Any, validate: ValidatorFunctionWrapHandler) -> Layout:
    if value == "auto" or isinstance(value, AutoLayout):
        return AutoLayout()
    if isinstance(value, str):
        raise ValueError(f"found {value}, expected auto, or degrees such as {{dp_shard: 2}}")
    return validate(value)


LayoutOrAuto = Annotated[Layout, WrapValidator(_auto_or_layout, json_schema_input_type=Layout | Literal["auto"])]


class TrainConfig(StageConfig):
    """Supervised fine-tuning or preference optimization of a model (→ `model/`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["train"]
    method: Literal["sft", "dpo"]
    model: ModelReference
    data: DataConfig
    engine: Literal["fsdp", "megatron"] = "fsdp"
    layout: LayoutOrAuto = Field(Layout(), description="auto: what the planner finds best for the machine at hand.")
    dpo: DpoConfig | None = Field(None, description="Only with `method: dpo`.")

    steps: PositiveInt | None = Field(None, description="Optimizer steps; else `epochs` counts.")
    epochs: PositiveFloat = Field(1.0, description="Passes over the training data.")
    global_batch_size: PositiveInt = Field(description="Packed rows of one optimizer step, over all processes.")
    learning_rate: PositiveFloat = Field(description="Of AdamW, after the warm-up.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Of the learning rate.")
    warmup_steps: NonNegativeInt = Field(0, description="Steps in which the learning rate grows linearly from 0.")
    min_learning_rate_fraction: float = Field(0.0, ge=0, le=1, description="Where cosine and linear end.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="Added to the denominator of Adam.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled, as in AdamW.")
    max_grad_norm: PositiveFloat | None = 1.0
    precision: Literal["fp32", "bf16", "fp8"] = Field(
        "bf16",
        description="bf16: parameters and activations in bfloat16, reduction and master weights in fp32. fp8: so too, "
        "but layers multiply in 8 bits (megatron, on GPUs with Transformer Engine).",
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Of the written weights.")
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")
    seed: NonNegativeInt = Field(0, description="Of the order of rows and of dropout.")
    execution: TrainExecution = TrainExecution()

    @property
    def product(self) -> Product:
        return "model"

    @property
    def processes(self) -> int:
        return self.execution.processes or max(1, self.layout.world_size // self.execution.nodes)

    @property
    def micro_batches_per_step(self) -> int:
        """Forward passes of one process in one optimizer step (gradient accumulation)."""
        return self.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)

    @property
    def setting(self) -> Setting:
        """What the layout must fit besides the model."""
        return Setting(self.execution.nodes, self.processes, self.data.sequence_length, self.global_batch_size)

    def resume_identity(self) -> dict[str, JsonValue]:
        """Without engine and layout: a checkpoint of either engine can be loaded by both, under any layout."""
        return {key: value for key, value in self.identity().items() if key not in ("engine", "layout")}

    @model_validator(mode="before")
    @classmethod
    def _dpo_defaults(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("method") == "dpo":
            return {"dpo": {}, **fields}
        return fields

    @model_validator(mode="after")
    def _dpo_only_with_dpo(self) -> Self:
        if self.dpo and self.method != "dpo":
            raise ValueError("`dpo` is set but `method` is sft; remove `dpo` or say `method: dpo`")
        return self

    @model_validator(mode="after")
    def _fp8_only_with_megatron(self) -> Self:
        if self.precision == "fp8" and self.engine != "megatron":
            raise ValueError("`precision: fp8` needs `engine: megatron`; choose it, or say `precision: bf16`")
        return self

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        if isinstance(self.layout, AutoLayout):
            return self
        problems = layout_problems(self.engine, self.layout, self.setting)
        errors = [problem.message for problem in problems if problem.severity == "error"]
        if errors:
            raise PydanticCustomError(LAYOUT_PROBLEM, "{problems}", {"problems": "; ".join(errors)})
        return self
