"""Distillation: the model's token probabilities are trained towards a teacher's, on given texts or its own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.fields import HELD_IN_FP32, AddedLater, PositiveFp32, StrictModel
from stages.kinds.train.methods.method import Method, OnPolicySteps, TeacherServer, TeacherTokens
from stages.kinds.train.methods.rollouts import SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals

METRICS = {
    "teacher_agreement": "share of target tokens whose likeliest candidate is the teacher's likeliest",
    "teacher_rest": "mean probability that the teacher gives to tokens beyond its top k",
    "target_nll": "mean negative log-likelihood of the texts' own tokens, at the temperature",
}


class DistillSampling(SamplingOptions):
    """Options of sampling the model's own answers; defaults are those of TRL's GKD."""

    max_completion_length: PositiveInt = Field(
        128, description="Largest number of tokens of a sampled completion, after which it is cut off."
    )
    temperature: PositiveFp32 = Field(0.9, le=100, description="Temperature of sampling.")


class DistillConfig(StrictModel):
    """Options of distillation by a generalised Jensen-Shannon divergence (Agarwal et al. 2024), named as in GKD."""

    beta: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), HELD_IN_FP32] = Field(
        0.5,
        description="Interpolation between two KL divergences. 0: KL(teacher ‖ model), which covers all likely "
        "tokens; 1: KL(model ‖ teacher), which prefers the likeliest; between: both, from their mixture.",
    )
    temperature: PositiveFp32 = Field(
        1.0,
        description="Temperature of the loss: both models' logits are divided by it. (GKD's 0.9 is for sampling.)",
    )
    loss_top_k: PositiveInt = Field(
        64,
        description="Number of the teacher's likeliest tokens kept for each target; all others count as one token. "
        "The vocabulary's size makes the loss exact, at 8 bytes per token and target.",
    )
    teacher_server: Annotated[TeacherServer | None, AddedLater()] = Field(
        None, description="Server that runs the teacher, instead of a stage's model (`teacher`)."
    )
    lmbda: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), HELD_IN_FP32, AddedLater()] = Field(
        0.0,
        description="Share of training steps that learn from the model's own answers (on-policy), drawn at random and "
        "scored by the teacher. 0: none, and no server is started; GKD has 0.5.",
    )
    sampling: Annotated[DistillSampling | None, AddedLater()] = Field(
        None, description="Options of sampling the model's own answers; only with `lmbda` above 0."
    )

    @property
    def on_policy(self) -> OnPolicySteps | None:
        return OnPolicySteps(self.lmbda, self.sampling or DistillSampling()) if self.lmbda else None

    @model_validator(mode="after")
    def _samples_where_it_is_to(self) -> Self:
        if self.sampling and not self.lmbda:
            raise ValueError("`sampling` has no effect while `lmbda` is 0; remove it, or set `lmbda`")
        return self

    @model_validator(mode="after")
    def _server_gives_what_is_asked(self) -> Self:
        if self.teacher_server and self.temperature != 1:
            raise ValueError(
                f"`temperature` is {self.temperature:g}, but a server (`teacher_server`) gives probabilities of the "
                "temperature 1 alone; remove it, or name the teacher's stage (`teacher`)"
            )
        return self


@dataclass(frozen=True)
class DistillLoss:
    """Distillation loss: mean over target tokens of β KL(t ‖ m) + (1 - β) KL(s ‖ m), with m = β t + (1 - β) s.

    Agarwal et al. 2024, equation 1; KL(t ‖ s) if β is 0, KL(s ‖ t) if it is 1. t and s are the teacher's and the
    model's probabilities of the teacher's top k tokens and of all others together.
    """

    config: DistillConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, signal: Signal) -> Counts:
        return {"targets": int(signal.has_target.sum())}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        candidates = signal.candidates
        assert candidates is not None
        # [rows, sequence, 1 + k]: the target's log-probability, then those of the teacher's k tokens
        targets, student = token_log_probabilities[..., 0], token_log_probabilities[..., 1:]
        # The teacher's tokens are sorted, so index 0 is its likeliest.
        is_same = (student.argmax(-1) == 0).float()
        # rounding can leave it a little below 0, hence the clamp in the metric
        rest = 1 - candidates.log_probabilities.exp().sum(-1)
        teacher = candidates.log_probabilities
        if not candidates.is_whole_vocabulary:
            student, teacher = _with_rest(student), _with_rest(teacher)
        values_by_name = {
            "loss": self._divergence(student, teacher),
            "teacher_agreement": is_same,
            "teacher_rest": rest.clamp(min=0),
            "target_nll": -targets.detach(),
        }
        per_target = values_by_name.values()
        loss, *metrics = (values.where(signal.has_target, 0.0).sum() / totals["targets"] for values in per_target)
        return loss, dict(zip(METRICS, metrics, strict=True))

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence between student and teacher at each target, [...], from log-probabilities [..., k]."""
        import torch

        beta = self.config.beta
        if beta == 0:
            return _kl(teacher, student)
        if beta == 1:
            return _kl(student, teacher)
        # log(β t + (1 - β) s), without leaving log space: small probabilities would underflow
        weights = student.new_tensor([beta, 1 - beta]).log()
        mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the KL divergence KL(p ‖ q) [...] of log-probabilities [..., k]."""
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(log_probabilities: Tensor) -> Tensor:
    """Append, as one more token, the log-probability of all beyond the top k: [..., k + 1], at least log ε of fp32."""
    import torch

    rest = 1 - log_probabilities.exp().sum(-1, keepdim=True)
    # below ε the difference from 1 is rounding, and log 0 would make the divergence infinite
    return torch.cat([log_probabilities, rest.clamp(min=torch.finfo(rest.dtype).eps).log()], -1)


DISTILL = Method(
    name="distill",
    rows="examples",
    build_loss=DistillLoss,
    options=DistillConfig,
    asks_teacher=lambda config: TeacherTokens(config.loss_top_k, config.temperature, config.teacher_server),
    metrics=METRICS,
    on_policy=lambda config: config.on_policy,
    headline=("teacher_agreement",),
)
