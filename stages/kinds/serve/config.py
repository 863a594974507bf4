"""Config of the serve stage, which starts a server for a model or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from stages.core.contract import AdapterReference, ModelOrAdapterReference, ModelReference, Reported, StageConfig
from stages.core.fields import AddedLater, StrictModel
from stages.models.facts import ModelFacts
from stages.serving.config import (
    LESS_MEMORY,
    BenchmarkConfig,
    ServeExecution,
    ServingConfig,
    Speculation,
    SpeculationMethod,
    limit_problems,
)
from stages.serving.registry import (
    chosen_engine,
    engine_problems,
    idle_serving_fields,
    installed_version,
    speculation_problems,
    unserved,
    with_engine,
)
from stages.serving.served_models import adapters_base, base_problems


class DraftModel(StrictModel):
    """Smaller model that guesses tokens ahead for a served model."""

    draft: ModelReference


class ServeConfig(StageConfig):
    """Config of the serve stage: starts, checks and benchmarks a model server, and keeps it up during the refresh."""

    STAGE_VERSION: ClassVar[int] = 2  # the time between tokens is one of whole answers, not of chunks of them
    PRODUCTS = ("server",)
    REPORTED = Reported(
        under_load={
            "ttft_ms": "time to first token, ms",
            "inter_token_latency_ms": "between tokens, ms",
            "output_tokens_per_s": "output tokens/s",
            "accepted_fraction": "guessed tokens accepted",
        }
    )

    HAS_CHECK: ClassVar[bool] = True
    LESS_MEMORY: ClassVar[str] = LESS_MEMORY

    kind: Literal["serve"]
    model: ModelOrAdapterReference
    adapters: Annotated[tuple[AdapterReference, ...], AddedLater()] = Field(
        (), description="More adapters of the same base model, which the server serves besides `model`."
    )
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None, description="Base model of the adapter in `model`; found automatically."
    )
    serving: ServingConfig = ServingConfig()
    speculative: Annotated[Literal["ngram", "mtp"] | DraftModel | None, AddedLater()] = Field(
        None,
        description="Guessing of tokens ahead, which the model accepts or not. ngram: as they followed before; mtp: by "
        "the model's own layers of multi-token prediction; `{draft: STAGE}`: by a smaller model with the same "
        "tokens. Default: none.",
    )
    benchmark: BenchmarkConfig | None = BenchmarkConfig()
    execution: ServeExecution = ServeExecution()

    @model_validator(mode="after")
    def _check_lengths(self) -> ServeConfig:
        longest = self.serving.max_model_len
        if self.benchmark and longest and self.benchmark.tokens > longest:
            raise ValueError(
                f"benchmark: input_tokens and output_tokens are {self.benchmark.tokens} together, more than "
                f"serving.max_model_len, {longest}; lower them, or raise that"
            )
        return self

    def completed_among(self, stages: Mapping[str, StageConfig]) -> Self:
        serving = with_engine(self.serving, self.model, stages)
        return self.model_copy(update={"base": self.base or adapters_base(self.model, stages), "serving": serving})

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        yield from base_problems(self.model, self.base, self.adapters, stages)
        yield from engine_problems(self.serving, self.base or self.model, bool(self.served_adapters), stages)
        if self.speculation_method:
            yield from speculation_problems(self.serving, self.speculation_method, self.draft, stages)
        if self.draft == (self.base or self.model):
            yield f"speculative.draft: {self.draft} is the served model; name a smaller one with the same tokens"

    def model_problems(self, read_config: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
        facts = ModelFacts(read_config())
        problems = limit_problems(facts, self.serving, self.benchmark, self.execution.environment)
        yield from (f"{field}: {what}" for field, what in problems)
        if self.execution.is_local:
            yield from unserved(chosen_engine(self.serving), facts, self.serving)

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        yield from idle_serving_fields(self.serving)

    @property
    def served_adapters(self) -> tuple[str, ...]:
        """Names of the stages whose adapters the server serves, `model` included if it is one."""
        return (self.model, *self.adapters) if self.base else self.adapters

    @property
    def draft(self) -> str | None:
        """Name of the stage whose model guesses tokens ahead, if one does."""
        return self.speculative.draft if isinstance(self.speculative, DraftModel) else None

    @property
    def speculation_method(self) -> SpeculationMethod | None:
        """Method by which the server guesses tokens ahead; None if it does not."""
        return "draft" if isinstance(self.speculative, DraftModel) else self.speculative

    def speculation(self, inputs: Mapping[str, Path]) -> Speculation | None:
        """Return how the server guesses tokens ahead. inputs: artifact folders by stage."""
        if not self.speculation_method:
            return None
        draft = (inputs[self.draft] / "model").resolve() if self.draft else None
        return Speculation(method=self.speculation_method, draft=draft)

    @property
    def devices(self) -> int:
        return self.serving.tensor_parallel_size

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        return dict(installed_version(chosen_engine(self.serving)))
