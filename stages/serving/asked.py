"""Settings of stages that ask a model: by the server of a serve stage, or by one of the stage's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, JsonValue, PositiveInt

from stages.core.contract import AdapterReference, ModelReference, ServableReference, StageConfig
from stages.core.fields import AddedLater
from stages.serving.adapters import adapters_base, base_problems
from stages.serving.config import LESS_MEMORY, EngineName, ServeExecution, ServingConfig, limit_problems
from stages.serving.engine import Engine
from stages.serving.registry import (
    chosen_engine,
    engine_of,
    engine_problems,
    idle_serving_fields,
    installed_version,
    with_engine,
)

if TYPE_CHECKING:
    from stages.serving.client import Client


@dataclass(frozen=True)
class ServedModel:
    """A model on a server that is ready to be asked.

    folder: of the model, for its tokenizer.
    context_tokens: length of prompt and answer together.
    takes_tokens: whether prompts may be token ids.
    """

    client: Client
    folder: Path
    context_tokens: int
    trust_remote_code: bool
    takes_tokens: bool = True


class AskExecution(ServeExecution):
    """Execution settings of a stage that asks a model, and of the server that it may start."""

    concurrent_requests: PositiveInt = Field(16, description="Number of requests that the server has at a time.")


class AskedModelConfig(StageConfig):
    """Base config of stages that ask a served model: a serve stage's, or a model or an adapter on their own server."""

    LESS_MEMORY: ClassVar[str] = LESS_MEMORY

    model: ServableReference
    adapter: Annotated[AdapterReference | None, AddedLater()] = Field(
        None, description="Adapter to ask, if the server has several; default: the server's `model`."
    )
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None, description="For an adapter: the model that it was trained on; found automatically."
    )
    serving: ServingConfig | None = Field(
        None, description="Server settings, only for a model or an adapter; a serve stage brings its own."
    )
    engine: Annotated[EngineName | None, AddedLater()] = Field(
        None, description="Engine of a serve stage, if it is not vllm; found automatically."
    )
    execution: AskExecution = AskExecution()

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        update: dict[str, object] = {"base": self.base or adapters_base(self.model, stages)}
        if stages[self.model].product != "server":
            update["serving"] = with_engine(self.serving, self.model, stages)
        elif serving := getattr(stages[self.model].completed_among(stages), "serving", None):
            update["engine"] = serving.engine
        return self.model_copy(update=update)

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        server = stages[self.model]
        if server.product != "server":
            yield from base_problems(self.model, self.base, (), stages)
            yield from engine_problems(self.serving, self.base or self.model, bool(self.base), stages)
            if self.adapter:
                yield f"adapter: is {self.adapter}, but {self.model} is no server; say `model: {self.adapter}`"
            return
        if self.base:
            yield f"base: is {self.base}, but {self.model} is a server and has its own; remove it"
        references = server.references()
        served = {name for field, name in references.items() if field == "model" or field.startswith("adapters.")}
        if self.adapter and self.adapter not in served:
            yield f"adapter: is {self.adapter}, but {self.model} serves {', '.join(sorted(served))}"

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        yield from idle_serving_fields(self.serving)

    @property
    def devices(self) -> int:
        return self.serving.tensor_parallel_size if self.serving else 1

    def model_problems(self, read_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        serving, environment = self.serving or ServingConfig(), self.execution.environment
        yield from (f"{field}: {what}" for field, what in limit_problems(read_config(), serving, None, environment))

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        return {**installed_version(self.serving_engine)}

    @property
    def serving_engine(self) -> Engine:
        """Serving engine of the server that is asked."""
        return engine_of(self.engine) if self.engine else chosen_engine(self.serving)
