"""What a recipe may say of a download: one model or one dataset, and where it comes from."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from stages.core.contract import StageConfig
from stages.download.source import Source, parse_source

SOURCE_HELP = "hf://org/name[@revision], modelscope://org/name[@revision], file://PATH or builtin/NAME"


class DownloadConfig(StageConfig):
    """Fetch a model (→ `model/`) or a dataset (→ `data/`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["download"]
    model: str | None = Field(None, description=f"Source of a model: {SOURCE_HELP}.")
    dataset: str | None = Field(
        None, description="Source of a dataset: hf://datasets/org/name[@revision], file://PATH or builtin/NAME."
    )
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
    def source_text(self) -> str:
        """The source as the recipe writes it."""
        source = self.model if self.model is not None else self.dataset
        assert source is not None
        return source

    @property
    def source(self) -> Source:
        """The source, parsed."""
        return parse_source(self.source_text, self.product)

    def identity(self) -> dict[str, JsonValue]:
        """Without a file's path and a hub's branch: the resolved revision stands in for them."""
        return {**super().identity(), self.product: self.source.place}

    def resolve_outside(self) -> dict[str, JsonValue]:
        from stages.download.revision import resolve_revision

        return {"revision": resolve_revision(self)}
