"""What an engine needs to know of a stage: layout, precision, optimizer. Light: a config gives it without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.adapters.config import AdapterConfig
from stages.parallel.layout import Layout
from stages.planner.workload import Precision

Fp8Recipe = Literal["tensorwise", "rowwise"]
"""What shares a scale in 8 bits; torchao's names."""


@dataclass(frozen=True)
class AdamSettings:
    """AdamW (Loshchilov and Hutter 2019)."""

    learning_rate: float
    """What the optimizer is made with; every step is given its own."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_norms_and_biases: bool = False
    """Whether they decay too; else matrices and embeddings alone do, as Transformers and TRL have it."""


@dataclass(frozen=True)
class MuonSettings:
    """Muon (Jordan et al. 2024) for matrices, beside AdamW for the rest. Fields are those of `torch.optim.Muon`."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"


@dataclass(frozen=True)
class LowPrecisionSettings:
    """What AdamW keeps in fewer bits."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    bf16_stochastic_round: bool = False
    """Whether weights are held in bf16 alone, and each step's are rounded at random."""


@dataclass(frozen=True)
class MoeSettings:
    """What is done with the routers of a mixture of experts."""

    aux_loss_coefficient: float = 0.0
    """What the loss that balances experts (`stages.engines.balance`) is multiplied by."""
    freeze_router: bool = False
    """Whether routers stay as they are."""


@dataclass(frozen=True)
class EngineSettings:
    """How an engine trains."""

    layout: Layout
    precision: Precision
    adam: AdamSettings
    seed: int = 0
    hang_timeout_s: float = 3600
    """When the stage ends an attempt that hangs; collectives wait longer."""
    trust_remote_code: bool = False
    """Whether code that came with the model may be run."""
    adapter: AdapterConfig | None = None
    """What learns beside the frozen model; None: the model itself learns."""
    has_score_head: bool = False
    """Whether the model gives one number a document (fsdp), not probabilities of tokens."""
    muon: MuonSettings | None = None
    """None: AdamW alone."""
    moe: MoeSettings = MoeSettings()
    low_precision: LowPrecisionSettings = LowPrecisionSettings()
    fp8_recipe: Fp8Recipe = "tensorwise"
