"""Distillation: the model's probabilities of tokens become those of a teacher, on given texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from stages.core.fields import AddedLater
from stages.core.numbers import HELD_IN_FP32, PositiveFp32
from stages.core.strict import StrictModel
from stages.kinds.train.methods.method import Method, OnPolicySteps, TeacherServer, TeacherTokens
from stages.kinds.train.methods.rollouts import SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Batch
    from stages.engines.loss import Counts, Parts, Totals

METRICS = {
    "teacher_agreement": "share of target tokens whose likeliest candidate is the teacher's likeliest",
    "teacher_rest": "mean probability that the teacher gives to tokens beyond its top k",
    "target_nll": "mean negative log-likelihood of the texts' own tokens, at the temperature",
}


class DistillSampling(SamplingOptions):
    """How the model answers; defaults are those of TRL's GKD."""

    max_completion_length: PositiveInt = Field(128, description="Tokens after which a completion is cut off.")
    temperature: PositiveFp32 = Field(0.9, le=100, description="Of sampling.")


class DistillConfig(StrictModel):
    """Distillation by a generalised Jensen-Shannon divergence (Agarwal et al. 2024), named as in TRL's GKD."""

    beta: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), HELD_IN_FP32] = Field(
        0.5,
        description="0: the divergence KL(teacher ‖ model), which covers all that the teacher says; 1: KL(model ‖ "
        "teacher), which keeps to its likeliest; between: both from their mixture.",
    )
    temperature: PositiveFp32 = Field(
        1.0, description="Divides the logits of both. GKD's, 0.9, is that of its samples; its loss has 1, too."
    )
    loss_top_k: PositiveInt = Field(
        64,
        description="Tokens of the teacher that are kept for each target; all others count as one. The vocabulary's "
        "size: exact, as in GKD, and large: 8 bytes a token and target.",
    )
    teacher_server: Annotated[TeacherServer | None, AddedLater()] = Field(
        None, description="Where the teacher is served, in the place of a stage's model (`teacher`)."
    )
    lmbda: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), HELD_IN_FP32, AddedLater()] = Field(
        0.0,
        description="Share of steps whose rows are answered by the model itself (on-policy), drawn step by step; the "
        "teacher is asked about these answers. 0: none, and no server is started; GKD has 0.5.",
    )
    sampling: Annotated[DistillSampling | None, AddedLater()] = Field(
        None, description="With `lmbda` above 0, how the model answers."
    )

    @property
    def on_policy(self) -> OnPolicySteps | None:
        return OnPolicySteps(self.lmbda, self.sampling or DistillSampling()) if self.lmbda else None

    @model_validator(mode="after")
    def _samples_where_it_is_to(self) -> Self:
        if self.sampling and not self.lmbda:
            raise ValueError("`sampling` does nothing while `lmbda` is 0; remove it, or say which share is on-policy")
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
    """Mean over target tokens of β KL(t ‖ m) + (1 - β) KL(s ‖ m), m = β t + (1 - β) s: Agarwal et al. 2024, equation 1;
    KL(t ‖ s) if β is 0, KL(s ‖ t) if it is 1. t and s are of the teacher's top k tokens and of the rest together.
    """

    config: DistillConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, batch: Batch) -> Counts:
        """Target tokens."""
        return {"targets": int(batch.has_target.sum())}

    def __call__(self, token_log_probabilities: Tensor, batch: Batch, totals: Totals) -> Parts:
        """Loss and metrics."""
        candidates = batch.candidates
        assert candidates is not None
        targets, student = token_log_probabilities[..., 0], token_log_probabilities[..., 1:]
        is_same = (student.argmax(-1) == 0).float()
        rest = 1 - candidates.log_probabilities.exp().sum(-1)
        teacher = candidates.log_probabilities
        if not candidates.is_whole_vocabulary:
            student, teacher = _with_rest(student), _with_rest(teacher)
        found = {
            "loss": self._divergence(student, teacher),
            "teacher_agreement": is_same,
            "teacher_rest": rest.clamp(min=0),
            "target_nll": -targets.detach(),
        }
        loss, *metrics = (values.where(batch.has_target, 0.0).sum() / totals["targets"] for values in found.values())
        return loss, dict(zip(METRICS, metrics, strict=True))

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Of log-probabilities [..., k]: [...]."""
        import torch

        beta = self.config.beta
        if beta == 0:
            return _kl(teacher, student)
        if beta == 1:
            return _kl(student, teacher)
        weights = student.new_tensor([beta, 1 - beta]).log()
        mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one ‖ other) of log-probabilities [..., k]: [...]."""
    return (one.exp() * (one - other)).sum(-1)


def _with_rest(log_probabilities: Tensor) -> Tensor:
    """[..., k] → [..., k + 1]: with that of all other tokens together, at least what fp32 tells from 0."""
    import torch

    rest = 1 - log_probabilities.exp().sum(-1, keepdim=True)
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
