"""Config of the download stage, which fetches one model, adapter or dataset."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from stages.adapters.headers import CONFIG_FILE, WEIGHTS_FILE
from stages.core.contract import ModelReference, Reported
from stages.core.fields import AddedLater, SourceText
from stages.hubs.fetched import FetchedConfig
from stages.hubs.hub import Request, Source
from stages.hubs.registry import HUBS, forms, hub_of, parse_source, streaming_prefixes


class DownloadConfig(FetchedConfig):
    """Config of the download stage: fetches one model, adapter or dataset into `model/`, `adapter/` or `data/`."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("model", "adapter", "dataset")
    REPORTED = Reported(counts_data=True, not_data=("num_files",))

    kind: Literal["download"]
    model: Annotated[str, SourceText()] | None = Field(None, description=f"Source of a model: {forms('model')}.")
    dataset: Annotated[str, SourceText()] | None = Field(None, description=f"Source of a dataset: {forms('dataset')}.")
    adapter: Annotated[str | None, SourceText(), AddedLater()] = Field(
        None, description="Source of a LoRA adapter in PEFT's format that was trained elsewhere."
    )
    base: Annotated[ModelReference | None, AddedLater()] = Field(
        None,
        description="Stage with the base model of `adapter`; its layers must have the sizes that the adapter expects.",
    )
    files: tuple[str, ...] | None = Field(
        None,
        description="Glob patterns of the files to fetch; default: the files that a model or dataset needs.",
    )
    stream: Annotated[bool, AddedLater()] = Field(
        False,
        description="Do not copy a dataset from hf://, s3://, gs:// or az://; later stages stream it from there.",
    )
    media: Annotated[bool, AddedLater()] = Field(
        False,
        description="Fetch a dataset's pictures, videos and sounds too, which its rows name; default: files of rows "
        "alone.",
    )
    trust_remote_code: bool = Field(
        False, description="Keep Python files that come with a model; by default they are left out."
    )

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        if sum(source is not None for source in (self.model, self.adapter, self.dataset)) != 1:
            raise ValueError("name either a `model`, an `adapter` or a `dataset` to download")
        if (self.adapter is None) != (self.base is None):
            raise ValueError("`adapter` and `base`, the stage of the model that it belongs to, go together; name both")
        if self.adapter is not None and self.files is not None:
            raise ValueError("`files` is not for an `adapter`, which consists of the two that PEFT writes; remove it")
        if self.media and self.dataset is None:
            raise ValueError(f"`media` is for a `dataset`, and this is the source of a {self.product}; remove it")
        _ = self.source
        return self

    @model_validator(mode="after")
    def _can_be_streamed(self) -> Self:
        if self.stream and self.dataset is None:
            raise ValueError(f"`stream` is for a `dataset`: {self.product}s are needed whole; remove it")
        if self.stream and not HUBS[self.source.hub].streams:
            raise ValueError(
                f"`stream: true` reads datasets at {streaming_prefixes()} only, not at {self.source}; remove it"
            )
        return self

    @property
    def product(self) -> Literal["model", "adapter", "dataset"]:
        if self.adapter is not None:
            return "adapter"
        return "model" if self.model is not None else "dataset"

    @property
    def leaves_files(self) -> bool:
        return self.stream

    @property
    def brings_media(self) -> bool:
        return self.media

    @property
    def source(self) -> Source:
        if self.dataset is not None:
            return parse_source(self.dataset, "dataset")
        return parse_source(self.adapter or self.model or "", "model")

    @property
    def request(self) -> Request:
        patterns = self.files if self.adapter is None else (CONFIG_FILE, WEIGHTS_FILE)
        return Request(self.source, patterns, self.trust_remote_code, self.media)

    def identity(self) -> dict[str, JsonValue]:
        """Return the config for the cache key, with the resolved revision instead of a file's path or a hub's branch.

        For a dataset that stays where it is, the place counts as well.
        """
        place = str(self.source) if self.stream and self.source.place.endswith("://") else self.source.place
        return {**super().identity(), self.product: place}

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        return {"revision": hub_of(self.source).resolve_revision(replace(self.request, limit_s=limit_s))}
