"""Blocks of a training stage's config (optimizer, experts' routers, execution) and the ranges of its numbers.

The checks of what goes together are in `supported.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator

from stages.core.contract import Execution
from stages.core.fields import HELD_IN_FP32, NonNegativeFp32, Seconds, StrictModel
from stages.engines.settings import LowPrecisionSettings, MoeSettings, MuonSettings
from stages.planner.workload import Precision, StateBytes

UNSUPPORTED = {
    "adamw_8bit": "its moments need torchao or bitsandbytes, neither of which is in every training environment",
    "adafactor": "torch's implementation cannot step on parameters that FSDP2 has sharded (torch 2.13)",
}
"""Optimizers that people ask for, each with the reason why it is not supported."""
LOW_PRECISION = ("exp_avg_dtype", "exp_avg_sq_dtype", "bf16_stochastic_round")
"""Options of AdamW in fewer bits, named as in Megatron and torchao."""


class OptimizerConfig(StrictModel):
    """Optimizer of a training stage; fields are named as in torch."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="Optimizer. adamw: fused. muon: matrices of layers move by orthogonalised momentum (Jordan "
        "et al. 2024), embeddings, the head and vectors by AdamW (fsdp).",
    )
    momentum: NonNegativeFp32 = Field(0.95, lt=1, description="Decay of the mean of gradients (muon).")
    nesterov: bool = Field(True, description="Nesterov momentum: look ahead by one gradient (muon).")
    ns_steps: PositiveInt = Field(5, le=100, description="Newton-Schulz iterations (muon).")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="Learning-rate factor of a matrix [A, B] (muon). original: √max(1, A / B); match_rms_adamw: "
        "0.2 √max(A, B), so that AdamW's learning rate suits both.",
    )

    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Dtype of AdamW's first moment; bf16 rounds stochastically (adamw, fsdp)."
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Dtype of AdamW's second moment; bf16 rounds stochastically (adamw, fsdp)."
    )
    bf16_stochastic_round: bool = Field(
        False,
        description="Hold weights and gradients in bf16, without an fp32 copy; updated weights are rounded "
        "stochastically, so that small updates are right on average (adamw, fsdp).",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _is_supported(cls, name: Any) -> Any:
        if isinstance(name, str) and name in UNSUPPORTED:
            raise ValueError(f"found {name}: {UNSUPPORTED[name]}; expected adamw or muon")
        return name

    @property
    def muon(self) -> MuonSettings | None:
        """Muon's options as an engine takes them; None where AdamW updates every parameter."""
        if self.name == "adamw":
            return None
        return MuonSettings(self.momentum, self.nesterov, self.ns_steps, self.adjust_lr_fn)

    @property
    def low_precision(self) -> LowPrecisionSettings:
        """AdamW's storage dtypes as an engine takes them."""
        return LowPrecisionSettings(self.exp_avg_dtype, self.exp_avg_sq_dtype, self.bf16_stochastic_round)

    @property
    def for_planner(self) -> StateBytes:
        """Bytes that FSDP2's AdamW keeps per parameter, for the planner."""
        size = {"fp32": 4, "bf16": 2}
        weight = 2 if self.bf16_stochastic_round else 4
        return StateBytes(weight, size[self.exp_avg_dtype] + size[self.exp_avg_sq_dtype])

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield fields of an optimizer's config without effect, each with the reason."""
        if self.name == "adamw":
            for field in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"):
                yield field, "`optimizer.name: adamw` has `adam_beta1` and `adam_beta2`"
        else:
            for field in LOW_PRECISION:
                yield field, f"`optimizer.name: {self.name}` keeps fp32"


class MoeConfig(StrictModel):
    """Training of the routers in a mixture of experts."""

    aux_loss_coefficient: NonNegativeFp32 = Field(
        0.0,
        description="Weight of the load-balancing loss of experts: Transformers' `router_aux_loss_coef`; "
        "Megatron's `moe_aux_loss_coeff` is this × experts per token / mixture layers.",
    )
    freeze_router: bool = Field(False, description="Do not train the routers' weights.")

    @property
    def settings(self) -> MoeSettings:
        """Return the options of routers as an engine takes them."""
        return MoeSettings(self.aux_loss_coefficient, self.freeze_router)


class TrainExecution(Execution):
    """Execution of a training stage: processes, logging, evaluation, checkpoints, time limits; no identity."""

    processes: PositiveInt | None = Field(
        None, description="Processes on each node; default: as many as the layout needs."
    )
    log_every_steps: PositiveInt = Field(1, description="Steps between two points of the curves in MLflow.")
    evaluate_every_steps: PositiveInt | None = Field(
        None, description="Steps between evaluations on the held-out rows; default: only at the end."
    )
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="Steps between checkpoints; default: ten checkpoints in a run."
    )
    checkpoints_kept: PositiveInt = Field(2, description="Number of checkpoints that are kept; older ones are removed.")
    hang_timeout_s: Seconds = Field(
        3600,
        description="Time limit of each step, of the saving or evaluation after it, of a micro-batch of the reference, "
        "and of reading or writing the model; beyond it the attempt ends. After five steps of packed rows, the limit "
        "of a step is three times the longest of the last steps (at least 30 s), unless layout.compile is on.",
    )
    ready_timeout_s: Seconds = Field(
        600, description="Seconds that a server that samples completions may take to start or restart."
    )
    rollout_timeout_s: Seconds = Field(
        600,
        description="Seconds without an answer after which a server that samples is restarted, or waited for if others "
        "started it; asking a teacher's server fails.",
    )
    concurrent_requests: PositiveInt = Field(
        64, description="Requests that a server answers at a time (prompts, or documents for a teacher)."
    )
    deterministic: bool = Field(
        False,
        description="Use only kernels that give the same bits each time, as CPUs always do; GPUs become slower, and an "
        "operation without such a kernel is an error.",
    )
    measure_matmul_rate: bool = Field(True, description="Measure a CPU's peak FLOP/s, which MFU is relative to.")


Rate = Annotated[float, Field(ge=1e-12, allow_inf_nan=False), HELD_IN_FP32]
"""Positive rate of learning or clipping; at 1e-12, a change of an fp32 weight of 0.01 would be lost in rounding."""
Denominator = Annotated[float, Field(ge=1e-30, allow_inf_nan=False), HELD_IN_FP32]
"""Positive number that is added to a denominator in fp32."""
Epochs = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
"""Number of passes over the data, which may be a fraction; a few optimizer steps are asked for by `steps`."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
"""Rows of a global batch; published runs use some ten thousand at most."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Seed of a random generator, in the range that torch accepts."""


def _has_range(value: Any) -> Any:
    if value in ("fp16", "float16"):
        raise ValueError(
            f"found {value}, in which small gradients become 0 unless the loss is scaled, and no engine here scales "
            "it; expected bf16, which has the range of fp32, or fp32"
        )
    return value


TrainingPrecision = Annotated[Precision, BeforeValidator(_has_range)]
"""Dtype that layers compute in; fp16 is refused."""
