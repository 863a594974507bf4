"""What a recipe may say of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, PositiveInt

from stages.core.contract import AdapterReference, ModelReference, OutsidePath, ServableReference, StageConfig
from stages.core.fields import AddedLater, Product
from stages.evaluate.harnesses.harness import Evaluation
from stages.evaluate.harnesses.registry import default_harness
from stages.serving.adapters import adapters_base, base_problems
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import installed_version


class EvaluateExecution(ServeExecution):
    """How the benchmark is run, and where its server listens when it starts one."""

    concurrent_requests: PositiveInt = Field(16, description="Requests to the server at a time.")


class EvaluateConfig(StageConfig):
    """Run benchmark tasks against a server: that of a serve stage, or its own for a model or an adapter."""

    STAGE_VERSION: ClassVar[int] = 2  # the harness's own seeds: other few-shot examples than before
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["evaluate"]
    model: ServableReference
    adapter: Annotated[AdapterReference | None, AddedLater()] = Field(
        None, description="Of a server with several: which is asked; default: the server's `model`."
    )
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None, description="Of an adapter: the model that it was trained on; found by itself."
    )
    serving: ServingConfig | None = Field(
        None, description="Only for a model or an adapter; a serve stage brings its own."
    )
    tasks: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        min_length=1, description="Names of the harness's tasks, its own or of `task_folder`."
    )
    task_folder: OutsidePath | None = Field(None, description="Folder of local tasks (YAML and JSONL).")
    limit: PositiveInt | None = Field(None, description="Samples of each task; default: all.")
    num_fewshot: int | None = Field(None, ge=0, description="Default: the task's own.")
    apply_chat_template: bool | None = Field(
        None,
        description="Ask as a user of a chat, not as plain text; default: as the model was trained last, if that was "
        "here, else if it has a template.",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**32, description="Of few-shot examples and random numbers; default: the harness's own."
    )
    trust_task_code: Annotated[bool, AddedLater()] = Field(
        False, description="Run the code of `task_folder`: `!function` tags, and Jinja outside a sandbox."
    )
    execution: EvaluateExecution = EvaluateExecution()

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        return self.model_copy(update={"base": self.base or adapters_base(self.model, stages)})

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        server = stages[self.model]
        if server.product != "server":
            yield from base_problems(self.model, self.base, (), stages)
            if self.adapter:
                yield f"adapter: is {self.adapter}, but {self.model} is no server; say `model: {self.adapter}`"
            return
        if self.base:
            yield f"base: is {self.base}, but {self.model} is a server and has its own; remove it"
        references = server.references()
        served = {name for field, name in references.items() if field == "model" or field.startswith("adapters.")}
        if self.adapter and self.adapter not in served:
            yield f"adapter: is {self.adapter}, but {self.model} serves {', '.join(sorted(served))}"

    @property
    def product(self) -> Product:
        return "scores"

    @property
    def devices(self) -> int:
        return self.serving.tensor_parallel_size if self.serving else 1

    def resolve_outside(self) -> dict[str, JsonValue]:
        harness = default_harness()
        programs = {f"{harness.name}_version": harness.version(), **installed_version()}
        return {**programs, **harness.resolve_outside(self.evaluation)}

    def custom_code(self) -> tuple[str, ...]:
        """Also that of the recipe's own tasks, such as `sums.yaml: !function utils.score`.

        Raises EvaluationError for tasks that do not exist.
        """
        return (*super().custom_code(), *default_harness().custom_code(self.evaluation))

    @property
    def evaluation(self) -> Evaluation:
        """What a harness is asked for; as a chat only if the config says so."""
        return Evaluation(
            tasks=self.tasks,
            task_folder=self.task_folder,
            limit=self.limit,
            num_fewshot=self.num_fewshot,
            apply_chat_template=bool(self.apply_chat_template),
            seed=self.seed,
            trust_task_code=self.trust_task_code,
            concurrent_requests=self.execution.concurrent_requests,
        )
