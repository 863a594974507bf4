"""What a recipe may say of the optimizer beside its rates, and what cannot be had of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from stages.core.numbers import NonNegativeFp32
from stages.core.strict import StrictModel
from stages.engines.settings import LowPrecisionSettings, MuonSettings
from stages.parallel.layout import EngineName, Layout
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


def optimizer_errors(
    optimizer: OptimizerConfig, engine: EngineName, layout: Layout, precision: Precision, *, has_adapter: bool
) -> list[str]:
    """A sentence for each thing that does not go with the optimizer."""
    if optimizer.name == "adamw":
        return list(_low_precision_errors(optimizer, engine, layout, precision, has_adapter))
    found = []
    if engine != "fsdp":
        found.append(f"`optimizer.name: {optimizer.name}` needs `engine: fsdp`, found {engine}; change either")
    if has_adapter:
        found.append(
            f"`optimizer.name: {optimizer.name}` orthogonalises whole matrices, and an adapter has factors of them; "
            "remove `adapter`, or say `optimizer.name: adamw`"
        )
    if layout.cpu_offload:
        found.append(
            f"`optimizer.name: {optimizer.name}` gathers matrices on the device, and `layout.cpu_offload` has them in "
            "host memory; change either"
        )
    return found


def _low_precision_errors(
    optimizer: OptimizerConfig, engine: EngineName, layout: Layout, precision: Precision, has_adapter: bool
) -> Iterator[str]:
    default = OptimizerConfig()
    changed = [name for name in LOW_PRECISION if getattr(optimizer, name) != getattr(default, name)]
    if engine != "fsdp":
        for name in changed:
            yield (
                f"`optimizer.{name}` needs `engine: fsdp`, found {engine}, which has it with Transformer Engine's "
                "optimizer only; change either"
            )
    if not optimizer.bf16_stochastic_round:
        return
    if precision != "bf16":
        yield f"`optimizer.bf16_stochastic_round` needs `precision: bf16`, found {precision}; change either"
    if has_adapter:
        yield "`optimizer.bf16_stochastic_round` is of whole models, and an `adapter` learns in fp32; remove either"
    if layout.accumulate == "sharded":
        yield (
            "`optimizer.bf16_stochastic_round` has shards of gradients in bf16, in which `layout.accumulate: sharded` "
            "would add them up; say `accumulate: whole`"
        )
