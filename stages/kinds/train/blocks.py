"""Config blocks of a training stage (optimizer, expert routers, execution), and number types with allowed ranges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator

from stages.core.contract import Execution
from stages.core.fields import HELD_IN_FP32, AddedLater, NonNegativeFp32, Seconds, StrictModel
from stages.engines.settings import LowPrecisionSettings, MoeSettings, MuonSettings
from stages.models.media import ModelPart
from stages.planner.workload import OptimizerName, Precision, StateBytes

UNSUPPORTED = {
    "adamw_8bit": "its moments need torchao or bitsandbytes, neither of which is in every training environment",
    "adafactor": "torch's implementation cannot step on parameters that FSDP2 has sharded (torch 2.13)",
}
"""Unsupported optimizers that people ask for, each with the reason."""
OPTIMIZERS: dict[OptimizerName, type[LowPrecisionSettings | MuonSettings]] = {
    "adamw": LowPrecisionSettings,
    "muon": MuonSettings,
}
"""Settings that only one optimizer takes; its options in a recipe have the same names."""


class OptimizerConfig(StrictModel):
    """Config block of a training stage's optimizer; fields are named as in torch."""

    name: OptimizerName = Field(
        "adamw",
        description="adamw: AdamW with a fused kernel. muon: weight matrices in layers move by orthogonalised "
        "momentum (Jordan et al. 2024), all else by AdamW; only with `engine: fsdp`.",
    )
    momentum: NonNegativeFp32 = Field(0.95, lt=1, description="Decay of the running mean of gradients; only for muon.")
    nesterov: bool = Field(True, description="Use Nesterov momentum, which looks ahead by one gradient; only for muon.")
    ns_steps: PositiveInt = Field(
        5, le=100, description="Number of Newton-Schulz iterations that orthogonalise the momentum; only for muon."
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="Factor on the learning rate of a matrix [A, B]; only for muon. original: √max(1, A / B). "
        "match_rms_adamw: 0.2 √max(A, B), for a learning rate chosen for AdamW.",
    )

    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of AdamW's first moment; bf16 is rounded stochastically. Only for adamw with fsdp.",
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of AdamW's second moment; bf16 is rounded stochastically. Only for adamw with fsdp.",
    )
    bf16_stochastic_round: bool = Field(
        False,
        description="Hold weights and gradients in bf16, without an fp32 copy, and round updates stochastically. Only "
        "for adamw with fsdp.",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _is_supported(cls, name: Any) -> Any:
        if isinstance(name, str) and name in UNSUPPORTED:
            raise ValueError(f"found {name}: {UNSUPPORTED[name]}; expected adamw or muon")
        return name

    @property
    def settings(self) -> LowPrecisionSettings | MuonSettings:
        """Settings that only the chosen optimizer takes."""
        taken = OPTIMIZERS[self.name]
        return taken(**{one.name: getattr(self, one.name) for one in fields(taken)})

    @property
    def in_fewer_bits(self) -> list[str]:
        """Names of the options that store AdamW's state in fewer bits, where they are used."""
        default = LowPrecisionSettings()
        return [name for name, value in vars(default).items() if getattr(self, name) != value]

    @property
    def for_planner(self) -> StateBytes:
        """Bytes that FSDP2's AdamW keeps per parameter, for the planner's memory estimate."""
        size = {"fp32": 4, "bf16": 2}
        weight = 2 if self.bf16_stochastic_round else 4
        return StateBytes(weight, size[self.exp_avg_dtype] + size[self.exp_avg_sq_dtype])

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield optimizer options that have no effect with the chosen optimizer, each with the reason."""
        for other, taken in OPTIMIZERS.items():
            for one in fields(taken) if other != self.name else ():
                yield one.name, f"only `optimizer.name: {other}` takes it"


class MoeConfig(StrictModel):
    """Config block for training the routers of a mixture-of-experts model."""

    aux_loss_coefficient: NonNegativeFp32 = Field(
        0.0,
        description="Weight of the experts' load-balancing loss, defined as Transformers' `router_aux_loss_coef`. "
        "Megatron's `moe_aux_loss_coeff` is this value × experts per token / number of mixture-of-experts "
        "layers.",
    )
    freeze_router: bool = Field(False, description="Freeze the routers: do not train their weights.")

    @property
    def settings(self) -> MoeSettings:
        return MoeSettings(self.aux_loss_coefficient, self.freeze_router)


class PartLearningRates(StrictModel):
    """Config block of the peak learning rates of a seeing model's parts; one that is not named has `learning_rate`."""

    vision_tower: Rate | None = Field(None, description="Peak learning rate of the vision tower.")
    projector: Rate | None = Field(None, description="Peak learning rate of the projector (or a tower's merger).")
    language_model: Rate | None = Field(None, description="Peak learning rate of the language model.")
    audio_tower: Annotated[Rate | None, AddedLater()] = Field(None, description="Peak rate of the audio tower.")

    @property
    def named(self) -> dict[ModelPart, float]:
        """Learning rates of the parts that have one of their own."""
        return {part: rate for part, rate in self if rate is not None}  # type: ignore[misc]


class TrainExecution(Execution):
    """Config block `execution` of a training stage; only `evaluate_every_steps` is in the cache key (`keep: best`)."""

    processes: PositiveInt | None = Field(
        None, description="Training processes on each node; default: as many as the layout needs."
    )
    log_every_steps: PositiveInt = Field(
        1, description="Training steps between two points of the metric curves in MLflow."
    )
    evaluate_every_steps: PositiveInt | None = Field(
        None, description="Training steps between evaluations on the held-out rows; default: only at the end."
    )
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="Training steps between checkpoints; default: a tenth of all steps."
    )
    checkpoints_kept: PositiveInt = Field(2, description="Number of checkpoints that are kept; older ones are removed.")
    hang_timeout_s: Seconds = Field(
        3600,
        description="Seconds that one activity may take before the attempt is ended as hanging: a step, a save, an "
        "evaluation, or reading or writing the model. After five steps of packed rows, a step's limit is "
        "three times the longest recent step (at least 30 s), unless layout.compile is on.",
    )
    ready_timeout_s: Seconds = Field(
        600, description="Seconds that the server that samples completions may take to start or restart."
    )
    rollout_timeout_s: Seconds = Field(
        600,
        description="Seconds without an answer after which a sampling server is restarted (or waited for, if others "
        "started it), and a request to a teacher's server fails.",
    )
    concurrent_requests: PositiveInt = Field(
        64,
        description="Requests sent to a server at a time: prompts for sampling, documents for a teacher.",
    )
    deterministic: bool = Field(
        False,
        description="Use only deterministic kernels, as CPUs always do. GPUs become slower, and an operation without "
        "one is an error.",
    )
    measure_matmul_rate: bool = Field(
        True, description="On a CPU, measure the peak FLOP/s that MFU (model FLOPs utilisation) is relative to."
    )


Rate = Annotated[float, Field(ge=1e-12, allow_inf_nan=False), HELD_IN_FP32]
"""Positive learning rate or clipping threshold; at 1e-12 an update of an fp32 weight of 0.01 is lost in rounding."""
Denominator = Annotated[float, Field(ge=1e-30, allow_inf_nan=False), HELD_IN_FP32]
"""Number type of config fields that are added to an fp32 denominator, such as Adam's epsilon; always positive."""
Epochs = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
"""Number of passes over the training data, fractions allowed; use `steps` for a few optimizer steps."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
"""Number type of the global batch size, in rows; published runs use some ten thousand rows at most."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _has_range(value: Any) -> Any:
    if value in ("fp16", "float16"):
        raise ValueError(
            f"found {value}, in which small gradients become 0 unless the loss is scaled, and no engine here scales "
            "it; expected bf16, which has the range of fp32, or fp32"
        )
    return value


TrainingPrecision = Annotated[Precision, BeforeValidator(_has_range)]
"""Dtype that layers compute in; fp16 is refused, since no engine here scales the loss."""
