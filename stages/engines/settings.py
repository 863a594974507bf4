"""Settings of a training engine: layout, precision, optimizer. Light: configs make them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.adapters.config import AdapterConfig
from stages.parallel.layout import Layout
from stages.planner.workload import Precision

Fp8Recipe = Literal["tensorwise", "rowwise"]
"""Granularity of the scales in 8 bits, in torchao's words."""


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW (Loshchilov and Hutter 2019)."""

    learning_rate: float
    """Initial learning rate; every step overrides it."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_norms_and_biases: bool = False
    """True if norms and biases decay too; Transformers and TRL decay matrices and embeddings only."""


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon (Jordan et al. 2024) for matrices, beside AdamW for the rest, as in `torch.optim.Muon`."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"


@dataclass(frozen=True)
class LowPrecisionSettings:
    """Dtypes of AdamW's state and weights in fewer bits."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    bf16_stochastic_round: bool = False
    """True if weights are held in bf16 only, updated with stochastic rounding."""


@dataclass(frozen=True)
class MoeSettings:
    """Training of the routers in a mixture of experts."""

    aux_loss_coefficient: float = 0.0
    """Weight of the loss that balances experts (`stages.engines.balance`)."""
    freeze_router: bool = False
    """True if routers are not trained."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a training engine."""

    layout: Layout
    precision: Precision
    adam: AdamSettings
    seed: int = 0
    hang_timeout_s: float = 3600
    """Seconds after which the stage ends an attempt that hangs; collectives wait longer."""
    trust_remote_code: bool = False
    """True if code that came with the model may be run."""
    adapter: AdapterConfig | None = None
    """Low-rank adapter that learns beside the frozen model; None: the whole model learns."""
    has_score_head: bool = False
    """True if the model gives one score a document (fsdp) instead of probabilities of tokens."""
    muon: MuonSettings | None = None
    """Muon's settings; None: AdamW alone."""
    moe: MoeSettings = MoeSettings()
    low_precision: LowPrecisionSettings = LowPrecisionSettings()
    fp8_recipe: Fp8Recipe = "tensorwise"
