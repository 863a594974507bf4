"""Config of the promote stage, which decides whether a model becomes champion."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from stages.core.approval import ApprovalConfig
from stages.core.contract import ModelOrAdapterReference, ScoresReference, ServerReference, StageConfig, StrictModel
from stages.core.fields import AddedLater, NatsPerToken
from stages.harnesses.harness import Evaluation
from stages.harnesses.registry import harness_of
from stages.rewards.judge import PairsConfig

SHARES = ("acc", "acc_norm", "exact_match")
"""Metrics of lm-eval that are averages of 0 and 1 over samples, so that their values lie between 0 and 1."""
MODEL_NAME = r"^[A-Za-z0-9][\w.-]*$"
"""Pattern of valid model names in MLflow's registry; their length is not in it, since pydantic compiles repetitions of
all letters of the world for 50 ms, at each start of a command."""
LONGEST_NAME = 128


class GatesConfig(StrictModel):
    """Gates of a promotion: limits that a candidate must keep to become champion; unset ones are not checked."""

    min_scores: dict[str, float] = Field(
        default_factory=dict,
        description="Smallest allowed score, by the score's name, such as {gsm8k.strict-match.exact_match: 0.4}.",
    )
    max_scores: dict[str, float] = Field(
        default_factory=dict,
        description="Largest allowed score, by the score's name, for scores that are better when lower.",
    )
    max_regression_standard_errors: NonNegativeFloat | None = Field(
        2.0,
        description="Largest regression of each score against the champion or baselines on the same samples, in "
        "standard errors of the difference. By chance alone, one score in 44 is worse by 2.",
    )
    min_win_rate: Annotated[float | None, AddedLater()] = Field(
        None,
        ge=0,
        le=1,
        description="Smallest win rate, 0 to 1, that the judge in `pairs` must give in each question set, if there is "
        "a model to compare with.",
    )
    max_kl_nats_per_token: NatsPerToken | None = Field(
        None,
        description="Largest allowed KL divergence of a quantized or merged model from its original, in nats "
        "per token.",
    )
    max_abs_logprob_difference: Annotated[NatsPerToken | None, AddedLater()] = Field(
        None,
        description="Largest difference, in nats per token, between log-probabilities recorded in training and those "
        "of the merged, quantized or served model, for the document that differs most.",
    )
    max_size_mib: PositiveFloat | None = Field(
        None, description="Largest allowed size of the weight files in MiB; for an adapter, of the adapter alone."
    )
    min_output_tokens_per_s: PositiveFloat | None = Field(
        None,
        description="Smallest allowed output tokens per second of the serve stage in `server`, at its best "
        "measured concurrency.",
    )


class PromoteConfig(StageConfig):
    """Config of the promote stage: compares a candidate with the champion, and makes it champion if all gates hold.

    It is judged once: neither a rollback nor another champion brings it up again, unless it is forced.
    """

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("verdict",)

    kind: Literal["promote"]
    name: str = Field(
        pattern=MODEL_NAME,
        max_length=LONGEST_NAME,
        description="Name of the registered model in MLflow, whose champion the candidate may become.",
    )
    model: ModelOrAdapterReference
    evaluations: tuple[ScoresReference, ...] = Field(
        min_length=1, description="Evaluate stages that scored the candidate in `model`."
    )
    baselines: tuple[ScoresReference, ...] = Field(
        (), description="Evaluate stages of another model to compare with. Default: those of the champion."
    )
    server: ServerReference | None = Field(
        None,
        description="Serve stage of `model`, whose throughput is checked and whose settings `lifecycle serve` uses.",
    )
    pairs: Annotated[PairsConfig | None, AddedLater()] = Field(
        None,
        description="LLM judge that compares the candidate's answers with the other model's, on the question sets.",
    )
    gates: GatesConfig = GatesConfig()
    approval: Annotated[ApprovalConfig | None, AddedLater()] = Field(
        None,
        description="People who must approve a candidate that keeps all gates; the refresh ends and waits for them.",
    )

    @property
    def devices(self) -> int:
        return 0

    @property
    def compares(self) -> bool:
        """Return whether the recipe compares the candidate with another model, by scores or by a judge."""
        return self.gates.max_regression_standard_errors is not None or self.pairs is not None

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        if not self.execution.is_local:
            yield "execution.launcher: a promotion asks MLflow where the refresh runs; expected local"
        for number, name in enumerate(self.evaluations):
            if (model := _model_of(name, stages)) != self.model:
                yield f"evaluations.{number}: {name} evaluates {model}; expected an evaluation of {self.model}"
        if self.server and self.model not in (served := _served_by(self.server, stages)):
            yield f"server: {self.server} serves {', '.join(served)}; expected a server of {self.model}"
        yield from self._problems_of_baselines(stages)
        yield from self._problems_of_bounds()
        if self.gates.min_output_tokens_per_s and not self.server:
            yield "gates.min_output_tokens_per_s: nothing measures it; name a serve stage as `server`"
        if self.pairs and not any(getattr(stages[name], "judge", None) for name in self.evaluations):
            yield (
                "pairs: no evaluation has answers to compare; name one with `harness: judge` in `evaluations`, or "
                "remove `pairs`"
            )
        if self.gates.min_win_rate is not None and not self.pairs:
            yield "gates.min_win_rate: nothing measures it; say in `pairs` which judge compares the answers"
        if self.gates.max_kl_nats_per_token and stages[self.model].RELATION not in ("quantized", "merge"):
            yield f"gates.max_kl_nats_per_token: {self.model} is not quantized, so there is nothing to compare it with"
        if self.gates.max_abs_logprob_difference and not self._is_compared_with_training(stages):
            yield (
                "gates.max_abs_logprob_difference: nothing measures it: only merging, quantizing and serving "
                f"what was trained here do, not {self.model}; name a serve stage as `server`"
            )

    def planned_problems(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield errors for gates that every candidate, or none, would pass."""
        asked = (getattr(stages[name], "evaluation", None) for name in self.evaluations)
        evaluations = [evaluation for evaluation in asked if isinstance(evaluation, Evaluation)]
        yield from (f"gates.{problem}" for problem in _unmeasured_scores(self.gates, evaluations))
        yield from (f"gates.{problem}" for problem in _beyond_a_share(self.gates, evaluations))
        benchmark = getattr(stages[self.server], "benchmark", None) if self.server else None
        if self.gates.min_output_tokens_per_s and self.server and benchmark is None:
            yield f"gates.min_output_tokens_per_s: {self.server} has no `benchmark`, which measures it; give it one"

    def _problems_of_baselines(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        for number, name in enumerate(self.baselines):
            if _model_of(name, stages) == self.model:
                yield (
                    f"baselines.{number}: {name} evaluates {self.model}, the candidate itself, so no gate could fail; "
                    "name an evaluation of another model, or leave `baselines` out to compare with the champion"
                )

    def _is_compared_with_training(self, stages: Mapping[str, StageConfig]) -> bool:
        """Return whether a later merge, quantize or serve stage compares the model with training's predictions."""
        made_by = stages[self.model]
        is_compared = self.server is not None or made_by.RELATION in ("quantized", "merge")
        while made_by.RELATION == "quantized":
            made_by = stages[made_by.references()["model"]]
        return is_compared and (made_by.RELATION in ("merge", "finetune") or made_by.product == "adapter")

    def _problems_of_bounds(self) -> Iterator[str]:
        for name, least in self.gates.min_scores.items():
            largest = self.gates.max_scores.get(name, least)
            if least > largest:
                yield f"gates: {name} is to be at least {least:g} and at most {largest:g}, which no score is"


def _unmeasured_scores(gates: GatesConfig, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    for field, bounds in (("min_scores", gates.min_scores), ("max_scores", gates.max_scores)):
        for score in bounds:
            if not any(harness_of(evaluation).may_give(score, evaluation) for evaluation in evaluations):
                tasks = ", ".join(task for evaluation in evaluations for task in evaluation.tasks)
                yield (
                    f"{field}: no evaluation gives the score {score}; the tasks are {tasks}, and their scores are "
                    "called TASK.METRIC, or TASK.FILTER.METRIC where the task has filters"
                )


def _beyond_a_share(gates: GatesConfig, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """Yield errors for score limits that look like percentages of a 0-to-1 score, or that every score would keep.

    Tasks with a person's own code are not checked: their scores may have any range.
    """
    if any(evaluation.trust_task_code for evaluation in evaluations):
        return
    for field, bounds, free in (("min_scores", gates.min_scores, 0), ("max_scores", gates.max_scores, 1)):
        for score, bound in bounds.items():
            if score.rpartition(".")[2] in SHARES and (bound == free or not 0 <= bound <= 1):
                advice = ", which nothing misses; be stricter, or remove it" if bound == free else "; say 0.4 for 40%"
                yield f"{field}: {score} is a share, from 0 to 1, and the bound is {bound:g}{advice}"


def _model_of(stage: str, stages: Mapping[str, StageConfig]) -> str:
    """Return the stage whose model or adapter an evaluate or serve stage uses, directly or through a serve stage."""
    references = stages[stage].references()
    target = references.get("adapter", references["model"])
    return _model_of(target, stages) if stages[target].product == "server" else target


def _served_by(server: str, stages: Mapping[str, StageConfig]) -> list[str]:
    """Return the names of the stages that made the model and the adapters that a serve stage serves."""
    references = stages[server].references()
    return [name for field, name in references.items() if field == "model" or field.startswith("adapters.")]
