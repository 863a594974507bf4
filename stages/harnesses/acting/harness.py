"""Evaluation harness in which the model acts in an environment, asked the questions of sets, and rewards judge it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.question_sets import QuestionSetHarness, read_questions
from stages.rollouts.environments.environment import unfit_options
from stages.serving.served_models import ServedModel

VERSION = "2"  # seeds that no other stage has; a budget of bytes and of calls for each turn
"""Version of the harness; raise it when the same questions and turns of the model would give other scores."""


class ActingHarness(QuestionSetHarness):
    """Evaluation harness of episodes in an environment; implements `Harness`."""

    name = "environment"
    title = "the environment"
    asks_in_texts = False
    unused: Mapping[str, str] = MappingProxyType(
        {
            "judge": "rewards judge (`episodes.rewards`)",
            "num_fewshot": "questions are asked without examples",
            "trust_task_code": "question sets have no code",
            "apply_chat_template": "episodes are chats",
        }
    )

    def version(self) -> str:
        return VERSION

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        return evaluation.episodes.environment.versions() if evaluation.episodes else {}

    def to_install(self) -> str | None:
        return None

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        if evaluation.episodes is None:
            yield "episodes: is missing; say with `harness: environment` in what the model acts, and what judges it"
            return
        if evaluation.episodes.makes_questions(evaluation.task_folder) and len(evaluation.tasks) > 1:
            yield (
                f"tasks: are {len(evaluation.tasks)}, and the questions are the environment's rows; expected one name "
                "for them, or their folder as `task_folder`"
            )
        for field, problem in evaluation.episodes.environment.problems():
            yield f"episodes.environment.{field}: {problem}"
        for option, why in unfit_options(evaluation.generation.stop, None):
            yield f"generation.{option}: {why}"
        if evaluation.episodes.num_samples > 1 and evaluation.generation.temperature == 0:
            yield (
                f"generation.temperature: is 0, so that {evaluation.episodes.num_samples} episodes of a question would "
                "be the same; raise it, or say `episodes.num_samples: 1`"
            )

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        episodes = evaluation.episodes
        if episodes is None:
            return ()
        own = [(f"rewards.{name}", reward.custom_code()) for name, reward in episodes.rewards.items()]
        own.append(("environment", episodes.environment.custom_code()))
        return tuple(f"episodes.{name}: {code}" for name, code in own if code)

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        metrics = evaluation.episodes.metrics if evaluation.episodes else []
        return score in [f"{task}.{metric}" for task in evaluation.tasks for metric in metrics]

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        if evaluation.episodes and evaluation.episodes.makes_questions(evaluation.task_folder):
            return  # the environment was opened
        for task in evaluation.tasks:
            if not list(read_questions(evaluation, task)):  # checks every question
                raise EvaluationError(f"the task {task} has no questions")

    def check(self, evaluation: Evaluation, cache: Path, model: Path | None, base: Path | None = None) -> str | None:
        from stages.harnesses.acting.playing import check_template

        self.prepare(evaluation, cache)
        if model:
            check_template(evaluation, model, base or model)
        return None

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        from stages.harnesses.acting.playing import played

        return played(evaluation, context, await_model(), VERSION)
