"""Registry of hubs (Hugging Face, ModelScope, local files, S3, …), by the prefix of their sources in a recipe.

Light: a hub's module is imported when its first source is asked for.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from stages.core.errors import ModelError
from stages.core.files import parse_json_object
from stages.hubs.builtin.hub import parse_builtin
from stages.hubs.hub import (
    Hub,
    Product,
    Source,
    StreamingHub,
    parse_champion,
    parse_object,
    parse_path,
    parse_repository,
    parse_stored,
)
from stages.models.facts import CONFIG_FILE


@dataclass(frozen=True)
class HubEntry:
    """Registry entry of a hub: the prefix and form of its sources, and the module that implements it.

    form: the rest of a source, for messages. parse: its parser. module: holds `HUB`. streams: its files can be read
    remotely. is_local: they lie on this machine, outside the store. is_offline: answers need no network. artifacts:
    which artifacts of this store its sources name; a plan puts their folders in place of the sources.
    """

    prefix: str
    form: str
    parse: Callable[[str, str, Product], Source]
    module: str
    products: tuple[Product, ...] = ("model", "dataset")
    streams: bool = False
    is_local: bool = False
    is_offline: bool = False
    artifacts: Literal["all", "adopted", "champions"] | None = None


HUBS: dict[str, HubEntry] = {
    "hf": HubEntry("hf://", "{datasets}org/name[@revision]", parse_repository, "stages.hubs.huggingface", streams=True),
    "modelscope": HubEntry(
        "modelscope://", "{datasets}org/name[@revision]", parse_repository, "stages.hubs.modelscope"
    ),
    "file": HubEntry("file://", "PATH", parse_path, "stages.hubs.files", is_local=True, is_offline=True),
    "s3": HubEntry("s3://", "BUCKET/PATH", parse_object, "stages.hubs.object_storage", streams=True),
    "gs": HubEntry("gs://", "BUCKET/PATH", parse_object, "stages.hubs.object_storage", streams=True),
    "az": HubEntry("az://", "CONTAINER/PATH", parse_object, "stages.hubs.object_storage", streams=True),
    "store": HubEntry("store://", "STAGE[-VERSION]", parse_stored, "stages.hubs.stored", artifacts="all"),
    "adopted": HubEntry("adopted:", "NAME", parse_stored, "stages.hubs.stored", artifacts="adopted"),
    "models": HubEntry(
        "models:/", "NAME@ALIAS", parse_champion, "stages.hubs.stored", ("model",), artifacts="champions"
    ),
    "builtin": HubEntry("builtin/", "NAME", parse_builtin, "stages.hubs.builtin.hub", is_offline=True),
}


def parse_source(text: str, product: Product) -> Source:
    """Return the source that a recipe's `model` or `dataset` names. Raises ValueError with the valid forms."""
    for name, entry in HUBS.items():
        if text.startswith(entry.prefix):
            try:
                return entry.parse(name, text.removeprefix(entry.prefix), product)
            except ValueError as error:
                raise ValueError(f"{error}; write {forms(product)}") from error
    raise ValueError(f"{text!r} is no source; write {forms(product)}")


def forms(product: Product) -> str:
    """Return all ways to write a model's or dataset's source, in words for an error message."""
    datasets = "datasets/" if product == "dataset" else ""
    entries = [entry for entry in HUBS.values() if product in entry.products]
    written = [f"{entry.prefix}{entry.form.format(datasets=datasets)}" for entry in entries]
    return f"{', '.join(written[:-1])} or {written[-1]}"


def streaming_prefixes() -> str:
    """Return the prefixes of sources whose files can be read remotely, as a comma-separated list for messages."""
    return ", ".join(entry.prefix for entry in HUBS.values() if entry.streams)


def streaming_hub_of(source: Source) -> StreamingHub:
    """Return the hub of a source whose files can be read remotely, without a download."""
    hub: StreamingHub = importlib.import_module(HUBS[source.hub].module).HUB
    return hub


def hub_of(source: Source) -> Hub:
    """Return the hub from which the model or dataset of a source is downloaded."""
    hub: Hub = importlib.import_module(HUBS[source.hub].module).HUB
    return hub


def read_model_config(source: Source, revision: str) -> dict[str, Any]:
    """Return the `config.json` of a model's revision from its hub.

    Raises DownloadError when the hub does not return it, ModelError when there is none that can be read.
    """
    try:
        text = hub_of(source).read_file(source, revision, CONFIG_FILE)
    except UnicodeDecodeError as error:
        raise ModelError(f"{CONFIG_FILE} of {source} is not UTF-8 text: {error.reason}; save it as such") from error
    if text is None:
        raise ModelError(
            f"looking for the model's sizes: {source} has no {CONFIG_FILE}; expected a Hugging Face model folder"
        )
    return parse_json_object(text, f"{CONFIG_FILE} of {source}")
