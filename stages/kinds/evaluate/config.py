"""Config of an evaluate stage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, PositiveInt

from stages.core.contract import OutsidePath, StageConfig
from stages.core.fields import AddedLater
from stages.harnesses.harness import Evaluation, GenerationConfig
from stages.harnesses.registry import DEFAULT_HARNESS, HarnessName, harness_of
from stages.rewards.judge import RatingConfig
from stages.serving.served_models import AskedModelConfig

TASK = re.compile(r"^(task|group):", re.MULTILINE)
"""Pattern of a line that defines a task in a task file."""


class EvaluateConfig(AskedModelConfig):
    """Score a model on tasks by asking a server: a serve stage's, or its own for a model or an adapter."""

    STAGE_VERSION: ClassVar[int] = 2  # the harness's own seeds: other few-shot examples than before
    PRODUCTS = ("scores",)
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["evaluate"]
    harness: Annotated[HarnessName, AddedLater()] = Field(DEFAULT_HARNESS, description="Harness that asks and scores.")
    tasks: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        min_length=1, description="Names of the harness's tasks, its own or of `task_folder`."
    )
    task_folder: OutsidePath | None = Field(None, description="Folder of local tasks (YAML and JSONL).")
    limit: PositiveInt | None = Field(None, description="Number of samples of each task; default: all.")
    num_fewshot: int | None = Field(
        None, ge=0, description="Number of few-shot examples in the prompt; default: the task's own."
    )
    apply_chat_template: bool | None = Field(
        None,
        description="Ask as a user of a chat instead of in plain text. Default: as the model was last trained, if it "
        "was trained here; else whether it has a chat template.",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**32, description="Seed of few-shot examples and random numbers; default: the harness's own."
    )
    trust_task_code: Annotated[bool, AddedLater()] = Field(
        False, description="Run the code in `task_folder`: `!function` tags, and Jinja outside a sandbox."
    )

    generation: Annotated[GenerationConfig, AddedLater()] = Field(
        GenerationConfig(), description="Settings of answers to questions whose task does not give them."
    )
    judge: Annotated[RatingConfig | None, AddedLater()] = Field(
        None, description="Judge of the answers, with `harness: judge`."
    )

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        harness = harness_of(self.evaluation)
        own = {f"{harness.name}_version": harness.version(), **harness.resolve_outside(self.evaluation, limit_s)}
        return {**super().resolve_outside(limit_s), **own}

    def to_install(self) -> str | None:
        """Return the packages that the harness installs before an evaluation, with their size; None if it has all."""
        return harness_of(self.evaluation).to_install()

    def hint_for(self, recipe_folder: Path) -> str | None:
        """Return where an unknown task has a file of its name, if task files are not searched there."""
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
        """Describe the code that an evaluation runs, also that of its own tasks (`sums.yaml: !function utils.score`).

        Raises EvaluationError for tasks that do not exist.
        """
        return (*super().custom_code(), *harness_of(self.evaluation).custom_code(self.evaluation))

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        yield from super().problems_among(stages)
        harness, engine = harness_of(self.evaluation), self.serving_engine
        yield from harness.problems(self.evaluation)
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

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        for field, why in harness_of(self.evaluation).unused.items():
            yield field, f"the harness is {self.harness}: {why}"

    @property
    def evaluation(self) -> Evaluation:
        """Return the request to the harness; as a chat only if the config says so."""
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
        )
