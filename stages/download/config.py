"""What a recipe may say of a download: one model or one dataset, and where it comes from."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from stages.contract import Product, StageConfig
from stages.download.builtin.catalog import BUILTINS
from stages.download.source import BuiltinSource, Source, parse_source

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
    def product(self) -> Product:
        return "model" if self.model else "dataset"

    @property
    def source(self) -> Source:
        """Where it comes from."""
        if self.model is not None:
            return parse_source(self.model, "model")
        assert self.dataset is not None
        return parse_source(self.dataset, "dataset")

    def resolve_outside(self) -> dict[str, JsonValue]:
        source = self.source
        if isinstance(source, BuiltinSource):
            return {"maker_version": BUILTINS[source.name].version}
        return {}
