"""Config of the evaluate stage, which scores a model on benchmark tasks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, PositiveInt

from stages.core.contract import OutsidePath, StageConfig
from stages.core.fields import AddedLater
from stages.harnesses.harness import EpisodesConfig, Evaluation, GenerationConfig
from stages.harnesses.registry import DEFAULT_HARNESS, HarnessName, harness_of
from stages.rewards.judge import RatingConfig
from stages.rollouts.environments.environment import shared_seeds
from stages.serving.config import DEFAULT_MAX_IMAGES, ServingConfig
from stages.serving.served_models import AskedModelConfig

TASK = re.compile(r"^(task|group):", re.MULTILINE)
"""Pattern by which a YAML file is recognized as a definition of evaluation tasks."""


class EvaluateConfig(AskedModelConfig):
    """Config of the evaluate stage: scores a model on tasks, on a serve stage's server or on one of its own."""

    STAGE_VERSION: ClassVar[int] = 2  # the harness's own seeds: other few-shot examples than before
    PRODUCTS = ("scores",)
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["evaluate"]
    harness: Annotated[HarnessName, AddedLater()] = Field(
        DEFAULT_HARNESS, description="Evaluation harness, which sends the tasks' questions and scores the answers."
    )
    tasks: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        min_length=1, description="Names of tasks in the harness or in `task_folder`."
    )
    task_folder: OutsidePath | None = Field(None, description="Folder with tasks of your own (YAML and JSONL files).")
    limit: PositiveInt | None = Field(None, description="Number of samples of each task to evaluate. Default: all.")
    num_fewshot: int | None = Field(
        None, ge=0, description="Number of few-shot examples in each prompt. Default: the task's own."
    )
    apply_chat_template: bool | None = Field(
        None,
        description="Send each question as a user's chat message (true) or as plain text. Default: as this project "
        "last trained the model; else true if it has a chat template.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**32,
        description="Random seed, also of the choice of few-shot examples. Default: the harness's own.",
    )
    trust_task_code: Annotated[bool, AddedLater()] = Field(
        False, description="Allow code in `task_folder` to run: `!function` tags, and Jinja outside a sandbox."
    )

    generation: Annotated[GenerationConfig, AddedLater()] = Field(
        GenerationConfig(), description="Sampling settings of answers, used where a task does not set them."
    )
    judge: Annotated[RatingConfig | None, AddedLater()] = Field(
        None, description="LLM judge that rates the answers; only with `harness: judge`."
    )

    episodes: Annotated[EpisodesConfig | None, AddedLater()] = Field(
        None, description="Environment, rewards and number of episodes; only with `harness: environment`."
    )

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        harness = harness_of(self.evaluation)
        own = {f"{harness.name}_version": harness.version(), **harness.resolve_outside(self.evaluation, limit_s)}
        return {**super().resolve_outside(limit_s), **own}

    def to_install(self) -> str | None:
        return harness_of(self.evaluation).to_install()

    def hint_for(self, recipe_folder: Path) -> str | None:
        """Return a hint if a file beside the recipe defines an unknown task, but `task_folder` does not point there."""
        known = set(self.task_folder.rglob("*.y*ml")) if self.task_folder else set()
        unknown = set(self.tasks) - {file.stem for file in known}
        files = [file for pattern in ("*.y*ml", "*/*.y*ml") for file in sorted(recipe_folder.glob(pattern))]
        for file in (file for file in files if file.stem in unknown and file.is_file()):
            # A file of that name may be a recipe instead of a task.
            if TASK.search(file.read_text(encoding="utf-8", errors="replace")):
                folder = file.parent.relative_to(recipe_folder)
                return f"the task {file.stem} is in {file}, where it is not looked for; write `task_folder: {folder}`"
        return None

    def custom_code(self) -> tuple[str, ...]:
        """Describe custom code (`sums.yaml: !function utils.score`) in an evaluation; EvaluationError: unknown task."""
        return (*super().custom_code(), *harness_of(self.evaluation).custom_code(self.evaluation))

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        yield from super().problems_among(stages)
        harness, engine = harness_of(self.evaluation), self.serving_engine
        yield from harness.problems(self.evaluation)
        learned = {name: stage for name, stage in stages.items() if stage.kind != self.kind}
        yield from (f"episodes.environment.{problem}" for problem in shared_seeds(self, learned))
        if self.generation.stop and not engine.capabilities.stop_texts:
            yield f"generation.stop: {engine.title} ends no answer at a text of several tokens; remove it, or take vllm"
        if not engine.capabilities.token_prompts and not harness.asks_in_texts:
            yield (
                f"harness: {harness.title} asks by token ids, which {engine.title} does not take for a prompt; take "
                "another harness, or serve the model with vllm"
            )
        if engine.capabilities.prompt_log_probabilities:
            return
        if tasks := harness.log_likelihood_tasks(self.evaluation):
            yield (
                f"tasks: {', '.join(tasks)} compare log-likelihoods of given answers, and {engine.title} returns "
                "none for prompts; choose tasks that generate (`output_type: generate_until`), or serve the "
                "unquantized model with vllm"
            )

    def planned_problems(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        is_served = stages[self.model].product == "server"
        serving = getattr(stages[self.model], "serving", None) if is_served else self.serving
        most = (serving or ServingConfig()).max_images or DEFAULT_MAX_IMAGES
        of = f" of the stage {self.model}" if is_served else ""
        for problem in harness_of(self.evaluation).question_problems(replace(self.evaluation, max_images=most)):
            yield f"tasks: {problem}{of}"

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        for field, why in harness_of(self.evaluation).unused.items():
            yield field, f"the harness is {self.harness}: {why}"

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(
            harness=self.harness,
            tasks=self.tasks,
            task_folder=self.task_folder,
            limit=self.limit,
            num_fewshot=self.num_fewshot,
            apply_chat_template=bool(self.apply_chat_template),
            seed=self.seed,
            trust_task_code=self.trust_task_code,
            concurrent_requests=self.execution.concurrent_requests,
            generation=self.generation,
            judge=self.judge,
            episodes=self.episodes,
        )
