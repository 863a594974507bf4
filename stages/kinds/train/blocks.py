"""What a recipe may say of the optimizer beside its rates, and what cannot be had of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator

from stages.core.contract import Execution
from stages.core.numbers import HELD_IN_FP32, NonNegativeFp32, Seconds
from stages.core.strict import StrictModel
from stages.engines.settings import LowPrecisionSettings, MoeSettings, MuonSettings
from stages.planner.workload import Precision, StateBytes

NOT_HAD = {
    "adamw_8bit": "its moments need torchao or bitsandbytes, of which neither is in every environment of training",
    "adafactor": "torch's cannot step on what FSDP2 has sharded (torch 2.13: the power of a norm's parts)",
}
"""Optimizers that people ask for, and why they cannot be had."""
LOW_PRECISION = ("exp_avg_dtype", "exp_avg_sq_dtype", "bf16_stochastic_round")
"""Named as in Megatron and torchao."""


class OptimizerConfig(StrictModel):
    """What learns from the gradients; fields are named as in torch."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw: fused. muon: matrices of layers move by orthogonalised momentum (Jordan et al. 2024), "
        "embeddings, the head and vectors by AdamW (fsdp).",
    )
    momentum: NonNegativeFp32 = Field(0.95, lt=1, description="Decay of the mean of gradients (muon).")
    nesterov: bool = Field(True, description="Look ahead by one gradient (muon).")
    ns_steps: PositiveInt = Field(5, le=100, description="Newton-Schulz iterations (muon).")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="What the learning rate of a matrix [A, B] is multiplied by (muon). original: √max(1, A / B); "
        "match_rms_adamw: 0.2 √max(A, B), so that AdamW's learning rate suits both.",
    )

    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Of the mean of gradients, as it is kept; in bf16 it is rounded at random (adamw, fsdp)."
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Of the mean of squared gradients, likewise (adamw, fsdp)."
    )
    bf16_stochastic_round: bool = Field(
        False,
        description="Hold weights and their gradients in bf16, with no copy in fp32; what a step makes of a weight is "
        "rounded at random, right on average (adamw, fsdp).",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _can_be_had(cls, name: Any) -> Any:
        if isinstance(name, str) and name in NOT_HAD:
            raise ValueError(f"found {name}: {NOT_HAD[name]}; expected adamw or muon")
        return name

    @property
    def muon(self) -> MuonSettings | None:
        """As an engine takes it; None: AdamW alone."""
        if self.name == "adamw":
            return None
        return MuonSettings(self.momentum, self.nesterov, self.ns_steps, self.adjust_lr_fn)

    @property
    def low_precision(self) -> LowPrecisionSettings:
        """As an engine takes it."""
        return LowPrecisionSettings(self.exp_avg_dtype, self.exp_avg_sq_dtype, self.bf16_stochastic_round)

    @property
    def for_planner(self) -> StateBytes:
        """Of FSDP2's AdamW."""
        size = {"fp32": 4, "bf16": 2}
        weight = 2 if self.bf16_stochastic_round else 4
        return StateBytes(weight, size[self.exp_avg_dtype] + size[self.exp_avg_sq_dtype])

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Fields without effect, and why."""
        if self.name == "adamw":
            for field in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"):
                yield field, "`optimizer.name: adamw` has `adam_beta1` and `adam_beta2`"
        else:
            for field in LOW_PRECISION:
                yield field, f"`optimizer.name: {self.name}` keeps fp32"


class MoeConfig(StrictModel):
    """Of models that send each token to some of their experts."""

    aux_loss_coefficient: NonNegativeFp32 = Field(
        0.0,
        description="What the loss that balances experts is multiplied by before it is added: Transformers' "
        "`router_aux_loss_coef`; Megatron's `moe_aux_loss_coeff` is this × experts per token / mixture layers.",
    )
    freeze_router: bool = Field(False, description="Leave the weights of routers as they are.")

    @property
    def settings(self) -> MoeSettings:
        """As an engine takes it."""
        return MoeSettings(self.aux_loss_coefficient, self.freeze_router)


class TrainExecution(Execution):
    """Where a training stage runs, how often it logs, evaluates and saves."""

    processes: PositiveInt | None = Field(None, description="Processes on each node; default: what the layout needs.")
    log_every_steps: PositiveInt = Field(1, description="Steps between two points of the curves in MLflow.")
    evaluate_every_steps: PositiveInt | None = Field(None, description="Default: only at the end.")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="Default: ten times in a run.")
    checkpoints_kept: PositiveInt = Field(2, description="Older ones are removed.")
    hang_timeout_s: Seconds = Field(
        3600,
        description="A step that takes longer ends the attempt; so does what is saved or evaluated after it, a "
        "micro-batch of the reference, and reading or writing the model. After five steps of packed rows, one that "
        "takes over three times the longest of the last ones (and 30 s) does, too, unless layout.compile is on.",
    )
    ready_timeout_s: Seconds = Field(
        600, description="How long a server that samples completions may take to start, or to come back."
    )
    rollout_timeout_s: Seconds = Field(
        600,
        description="Such a server that answers nothing for so long is ended, and started again, or waited for if "
        "others started it; a teacher's is given up.",
    )
    concurrent_requests: PositiveInt = Field(
        64, description="Prompts, or a teacher's documents, that are asked at a time."
    )
    measure_matmul_rate: bool = Field(True, description="On a CPU, measure the peak that MFU is relative to.")


Rate = Annotated[float, Field(ge=1e-12, allow_inf_nan=False), HELD_IN_FP32]
"""Of learning, or of clipping: a weight of 0.01 in fp32 has no room for a smaller change."""
Denominator = Annotated[float, Field(ge=1e-30, allow_inf_nan=False), HELD_IN_FP32]
"""Added to what fp32 can hold."""
Epochs = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
"""Fewer are a mistake: `steps` says how few optimizer steps are meant."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
"""Published runs take some ten thousand rows at most."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What generators of random numbers take."""


def _has_range(value: Any) -> Any:
    if value in ("fp16", "float16"):
        raise ValueError(
            f"found {value}, in which small gradients become 0 unless the loss is scaled, and no engine here scales "
            "it; expected bf16, which has the range of fp32, or fp32"
        )
    return value


TrainingPrecision = Annotated[Precision, BeforeValidator(_has_range)]
"""What layers compute in."""
