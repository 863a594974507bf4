"""Protocol of evaluation harnesses, which ask a served model a task's questions and return scores in one schema.

A new harness is a package here and a line in `registry.py`. The schema is lm-eval's, so that evaluations of a task can
be paired sample by sample (`stages/kinds/promote/paired.py`), whichever harness ran them:

- scores: `results` (task → {"METRIC,FILTER": score}; the filter `none` is no filter), `configs` (task → its settings),
  `versions`, `n-shot` and `higher_is_better` (task → {metric: bool});
- samples: a row for each document and filter, with `doc_id`, `filter`, the hashes `doc_hash`, `prompt_hash` and
  `target_hash` of what was asked, and the sample's value of each metric.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import Field, JsonValue, PositiveInt, model_validator

from stages.core.contract import StageContext
from stages.core.fields import StrictModel
from stages.models.media import MediaKind
from stages.rewards.judge import RatingConfig
from stages.rewards.registry import AnyReward, RewardName
from stages.rollouts.environments.environment import ENVIRONMENT
from stages.rollouts.environments.registry import AnyEnvironment
from stages.serving.config import StopTexts
from stages.serving.served_models import ServedModel

TAKEN = re.compile(
    "doc_id|filter|resps|ends|doc|question|target|media|(doc|prompt|target)_hash|pass_at_[0-9]+|" + ENVIRONMENT
)
"""Pattern of the columns that samples of episodes have besides the rewards."""


class GenerationConfig(StrictModel):
    """Default generation settings, for the questions of a task that sets none itself."""

    max_tokens: PositiveInt = Field(
        512, description="Largest number of tokens in an answer; longer answers are cut off."
    )
    temperature: float = Field(0.0, ge=0, le=100, description="Sampling temperature; 0: always the likeliest token.")
    stop: StopTexts = Field((), description="Texts that end an answer and are not part of it.")


class EpisodesConfig(StrictModel):
    """Episodes of `harness: environment`: what the model acts in, and what its episodes are worth."""

    environment: AnyEnvironment = Field(description="Environment in which the model acts.")
    rewards: dict[RewardName, AnyReward] = Field(
        default_factory=dict, description="Rewards that judge each episode; their means are scores."
    )
    num_samples: PositiveInt = Field(
        1, le=1024, description="Number of episodes of each question; with several, pass@k is estimated."
    )
    solved_above: float = Field(
        0.0, allow_inf_nan=False, description="An episode with a sum of rewards above this has solved its question."
    )

    @property
    def passes(self) -> dict[str, int]:
        """k of pass@k by the metric's name: 1, and the number of episodes of a question."""
        return {f"pass_at_{k}": k for k in sorted({1, self.num_samples})}

    @property
    def metrics(self) -> list[str]:
        """Names of the scores: rewards, the environment's own first, and pass@k."""
        own = [ENVIRONMENT] if self.environment.gives_rewards else []
        return [*own, *self.rewards, *self.passes]

    def makes_questions(self, task_folder: Path | None) -> bool:
        """Return whether the environment's own rows are the questions, as there is no folder of question sets."""
        return task_folder is None and self.environment.makes_rows

    @model_validator(mode="after")
    def _is_rewarded(self) -> Self:
        if not self.rewards and not self.environment.gives_rewards:
            raise ValueError("`rewards` is empty, and this environment gives none; name at least one")
        if taken := next(filter(TAKEN.fullmatch, self.rewards), None):
            raise ValueError(f"`rewards.{taken}` has the name of another column of the samples; choose another")
        return self


@dataclass(frozen=True)
class Evaluation:
    """Request to a harness for an evaluation, as the recipe states it.

    limit: samples of each task; None for all. num_fewshot, seed: None leaves them to task and harness. max_images: most
    media of a kind in a question that the server takes, 0 for a model that reads text alone; media_kinds: that it
    takes; None if not known yet.
    """

    harness: str
    tasks: tuple[str, ...]
    task_folder: Path | None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    seed: int | None = None
    trust_task_code: bool = False
    concurrent_requests: int = 1
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    judge: RatingConfig | None = None
    episodes: EpisodesConfig | None = None
    max_images: int | None = None
    media_kinds: frozenset[MediaKind] | None = None


@dataclass(frozen=True)
class Results:
    """Scores and samples of an evaluation, in the schema of lm-eval's results.

    scores: content of `scores.json`. samples: task → rows. metrics: further counts, such as a judge's cost.
    """

    scores: Mapping[str, Any]
    samples: Mapping[str, list[dict[str, Any]]]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskItem:
    """Texts of one benchmark sample, which no training row should contain.

    number: its `doc_id`. questions: as the task writes it, in words of this sample alone, also with its answer.
    """

    task: str
    number: int
    questions: tuple[str, ...]
    texts: tuple[str, ...]


class Harness(Protocol):
    """Protocol of an evaluation harness, such as lm-eval.

    name: in recipes, and in records as `NAME_version`. title: in messages. asks_in_texts: whether a server may take no
    token ids. unused: field of an evaluation, as recipes name it → why the harness does not use it.
    """

    name: str
    title: str
    asks_in_texts: bool
    unused: Mapping[str, str]

    def version(self) -> str:
        """Return the harness's installed version, or the one that `prepare` would install; raise ResourceError."""

    def to_install(self) -> str | None:
        """Return packages that `prepare` will install, with folder and size, or None; raise ResourceError."""

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        """Yield problems of an evaluation's settings, as `field: problem, and what to do`."""

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        """Return facts besides recipe and artifacts that determine the scores, such as commits of datasets on a hub.

        May ask the network; with limit_s, once, for this long. Raises EvaluationError for tasks that do not exist, or
        have code that is not trusted; DownloadError or TransientError if a hub gives no answer.
        """

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        """Describe code in the task folder that an evaluation would run; raise EvaluationError for unknown tasks."""

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        """Return whether the score `TASK.METRIC` or `TASK.FILTER.METRIC` can be produced; True if unknown."""

    def log_likelihood_tasks(self, evaluation: Evaluation) -> list[str]:
        """Return the tasks that need log-likelihoods of given texts, as far as that is known before they run."""

    def question_problems(self, evaluation: Evaluation) -> Iterator[str]:
        """Yield problems of questions that no server with the evaluation's `max_images` takes, as far as files tell."""

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        """Install missing packages, check the tasks, and set environment variables, before libraries are imported.

        doing: gets a description of what takes long. Raises EvaluationError, ResourceError.
        """

    def check(self, evaluation: Evaluation, cache: Path, model: Path | None, base: Path | None = None) -> str | None:
        """Check the tasks for every mistake that shows without a server; return what could not be checked, if anything.

        evaluation: with `apply_chat_template` if the model will be asked so. model: its folder, or one with the same
        tokenizer; None if not known yet. base: that of an adapter's base. Raises as `prepare` does.
        """

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        """Yield the texts of all samples of the tasks, also beyond `limit`, to compare training rows with them.

        Raises EvaluationError as `prepare` does, and for samples that their task cannot write down.
        """

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        """Run an evaluation: load the tasks while the server starts, ask the model, and score its answers.

        await_model: waits for the server; called once. Answers are kept in the scratch folder, for another attempt.
        Raises EvaluationError, TransientError, and whatever a lost connection raises.
        """
