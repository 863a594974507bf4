"""Settings of a training engine (parallel layout, precision, optimizer, adapter), made by configs without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stages.adapters.config import AdapterConfig
from stages.models.media import MediaKind, ModelPart
from stages.parallel.layout import Layout
from stages.planner.workload import Precision

Fp8Recipe = Literal["tensorwise", "rowwise"]
"""Granularity of the scales of 8-bit matrix products, by torchao's names."""


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW (Loshchilov and Hutter 2019)."""

    learning_rate: float
    """Learning rate with which the optimizer is created; every training step sets its own."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_norms_and_biases: bool = False
    """True if weight decay also applies to norms and biases, which Transformers and TRL exempt."""


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon (Jordan et al. 2024), named as in `torch.optim.Muon`; AdamW updates all but matrices."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"


@dataclass(frozen=True)
class LowPrecisionSettings:
    """Settings that store AdamW's moments, or the weights too, in bf16 instead of fp32."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    bf16_stochastic_round: bool = False
    """True if weights are kept in bf16 only, without fp32 copies, and updated with stochastic rounding."""


@dataclass(frozen=True)
class MoeSettings:
    """Settings for training the routers of a mixture of experts."""

    aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss of experts (`stages.engines.balance`); 0 turns that loss off."""
    freeze_router: bool = False


@dataclass(frozen=True)
class MediaSettings:
    """Settings for training on rows with media, by a model that reads them."""

    freeze: tuple[ModelPart, ...] = ()
    """Parts of the model that do not learn."""
    learning_rate_ratios: Mapping[ModelPart, float] = field(default_factory=dict)
    """Factor on every step's learning rate of the weights of a part; parts that are not named have 1."""
    kinds: Sequence[MediaKind] = ("image",)
    """Kinds of media in training and held-out rows, in the order of `KINDS`."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which a training engine is built, such as layout, precision and optimizer."""

    layout: Layout
    precision: Precision
    adam: AdamSettings
    seed: int = 0
    hang_timeout_s: float = 3600
    """Seconds after which the stage ends training that hangs; collectives wait longer."""
    trust_remote_code: bool = False
    """True if Python code that came with the model may be run."""
    adapter: AdapterConfig | None = None
    """Options of the low-rank adapter to train on the frozen model; None: the whole model is trained."""
    has_score_head: bool = False
    """True if the model gives one score per document instead of token probabilities (engine fsdp only)."""
    muon: MuonSettings | None = None
    """Settings of Muon; None: AdamW updates all weights."""
    moe: MoeSettings = MoeSettings()
    low_precision: LowPrecisionSettings = LowPrecisionSettings()
    fp8_recipe: Fp8Recipe = "tensorwise"
    mtp_loss_weight: float = 0.0
    """Weight of the loss of the model's layer of multi-token prediction; 0: the layer is not trained."""
    replays_experts: bool = False
    """True if batches may say to which experts tokens go (`ModelInputs.experts`)."""
    media: MediaSettings | None = None
    """Settings for rows with pictures; None: rows are text, and only the model's text part is run."""
