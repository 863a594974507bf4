"""Stages that serve or query a model: their config fields, and checks of adapters against their base model.

An adapter's one base is found by lineage and filled in as `base`, so that it is among the stage's inputs: no clean-up
removes it, and containers have it. A stage asks a model by a serve stage's server, or by its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, JsonValue, PositiveInt

from stages.adapters.headers import ADAPTER_FOLDER, read_headers
from stages.core.contract import AdapterReference, ModelReference, ServableReference, StageConfig, base_of
from stages.core.errors import ModelError
from stages.core.fields import AddedLater
from stages.models.facts import ModelFacts
from stages.serving.config import LESS_MEMORY, EngineName, ServeExecution, ServingConfig, limit_problems
from stages.serving.engine import Engine
from stages.serving.registry import (
    chosen_engine,
    engine_of,
    engine_problems,
    idle_serving_fields,
    installed_version,
    unserved,
    with_engine,
)

if TYPE_CHECKING:
    from stages.serving.client import Client
    from stages.serving.server import ReachedEngine

NOT_PUT_ON_A_BASE = ("use_dora", "modules_to_save", "target_parameters")
"""Adapter options that vLLM can serve only after the adapter is merged into its base model."""


def adapters_base(model: str, stages: Mapping[str, StageConfig]) -> str | None:
    """Return the name of the stage that made the base model if the stage `model` makes an adapter, else None."""
    return base_of(model, stages) if stages[model].product == "adapter" else None


def base_problems(
    model: str, base: str | None, adapters: Sequence[str], stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield problems of a stage that serves `model` (on `base`, if an adapter) and adapters, such as several bases."""
    for field, name in (("model", model), *((f"adapters.{number}", name) for number, name in enumerate(adapters))):
        trained = getattr(stages[name], "adapter", None)
        if found := [option for option in NOT_PUT_ON_A_BASE if getattr(trained, option, None)]:
            yield f"{field}: {name} trains an adapter with {', '.join(found)}, served merged only (`kind: merge`)"
    own_base = base_of(model, stages)
    if base not in (None, own_base):
        yield f"base: is {base}, but that of {model} is {own_base}; remove it: it is found automatically"
    elif base == model:
        yield f"base: is {base}, which is no adapter; remove it"
    for number, name in enumerate(adapters):
        if name in (model, *adapters[:number]):
            yield f"adapters.{number}: {name} is served already; every name can be given once"
        elif (other := base_of(name, stages)) != own_base:
            yield (
                f"adapters.{number}: {name} was trained on {other}, not on {own_base}, and one server has one base; "
                f"serve it in a stage of its own, or what a stage of `kind: merge` makes of it and {other}"
            )


def adapter_folders(names: Sequence[str], base: str, inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Return each served adapter's folder, by name; raise ModelError for one that was trained on another model."""
    folders = {name: (inputs[name] / ADAPTER_FOLDER).resolve() for name in names}
    for name, folder in folders.items():
        trained_on = read_headers(folder).base
        if trained_on != inputs[base].name:
            raise ModelError(
                f"serving the adapter {name} on {inputs[base].name}: it was trained on {trained_on or 'no artifact'}; "
                "train it on this model, or serve it on its own"
            )
    return folders


@dataclass(frozen=True)
class ServedModel:
    """Model on a running server, with its client, context length and folder, for a stage that queries it.

    context_tokens: of prompt and answer together. takes_tokens: whether prompts may be token ids. max_images: in one
    request. reached: the engine itself, for prompts of token ids and pictures; None where only its proxy is reached.
    asked: folder of the model or of the adapter on it that is asked; None: the model.
    """

    client: Client
    folder: Path
    context_tokens: int
    trust_remote_code: bool
    takes_tokens: bool = True
    max_images: int = 0
    reached: ReachedEngine | None = None
    asked: Path | None = None

    @property
    def asked_folder(self) -> Path:
        """Folder of the model or adapter that is asked, with the chat template that it was trained with."""
        return self.asked or self.folder


class AskExecution(ServeExecution):
    """Execution settings of a stage that queries a model, and of the server that it may start."""

    concurrent_requests: PositiveInt = Field(
        16, description="Number of requests that are sent to the server concurrently."
    )


class AskedModelConfig(StageConfig):
    """Base config of stages that query a model: on a serve stage's server, or on a server of their own."""

    LESS_MEMORY: ClassVar[str] = LESS_MEMORY

    model: ServableReference
    adapter: Annotated[AdapterReference | None, AddedLater()] = Field(
        None, description="Adapter to query, if the serve stage serves several; default: the serve stage's `model`."
    )
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None, description="Base model of the adapter in `model`; found automatically."
    )
    serving: ServingConfig | None = Field(
        None,
        description="Settings of this stage's own server; not allowed if `model` is a serve stage.",
    )
    engine: Annotated[EngineName | None, AddedLater()] = Field(
        None, description="Engine of the serve stage in `model`, if it is not vllm; found automatically."
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
        facts, serving = ModelFacts(read_config()), self.serving or ServingConfig()
        problems = limit_problems(facts, serving, None, self.execution.environment)
        yield from (f"{field}: {what}" for field, what in problems)
        if self.execution.is_local:
            yield from unserved(self.serving_engine, facts, serving)

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        return {**installed_version(self.serving_engine)}

    @property
    def serving_engine(self) -> Engine:
        return engine_of(self.engine) if self.engine else chosen_engine(self.serving)
