"""What a recipe may say of a download: one model or one dataset, and where it comes from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from stages.core.contract import StageConfig
from stages.core.fields import SourceText
from stages.hubs.hub import Request
from stages.hubs.registry import forms, hub_of, parse_source
from stages.hubs.source import Source


class DownloadConfig(StageConfig):
    """Fetch a model (→ `model/`) or a dataset (→ `data/`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["download"]
    model: Annotated[str, SourceText()] | None = Field(None, description=f"Source of a model: {forms('model')}.")
    dataset: Annotated[str, SourceText()] | None = Field(None, description=f"Source of a dataset: {forms('dataset')}.")
    files: tuple[str, ...] | None = Field(None, description="Only files that match one of these glob patterns.")
    trust_remote_code: bool = Field(False, description="Keep the Python files that come with a model.")

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if (self.model is None) == (self.dataset is None):
            raise ValueError("name either a `model` or a `dataset` to download")
        _ = self.source
        return self

    @property
    def product(self) -> Literal["model", "dataset"]:
        return "model" if self.model is not None else "dataset"

    @property
    def source(self) -> Source:
        """The source, parsed."""
        text = self.model if self.model is not None else self.dataset
        assert text is not None
        return parse_source(text, self.product)

    @property
    def request(self) -> Request:
        """What a hub is asked for."""
        return Request(self.source, self.files, self.trust_remote_code)

    def identity(self) -> dict[str, JsonValue]:
        """Without a file's path and a hub's branch: the resolved revision stands in for them."""
        return {**super().identity(), self.product: self.source.place}

    def resolve_outside(self) -> dict[str, JsonValue]:
        return {"revision": hub_of(self.source).resolve_revision(self.request)}
