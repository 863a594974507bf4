"""A model's `config.json` without downloading the model, for what is to be planned before."""

from __future__ import annotations

import json
from typing import Any

from stages.core.errors import ModelError
from stages.hubs.registry import hub_of
from stages.hubs.source import Source

CONFIG_FILE = "config.json"


def read_model_config(source: Source, revision: str) -> dict[str, Any]:
    """Of a model at a resolved revision.

    Raises DownloadError when the hub does not give it, ModelError when the source has none.
    """
    text = hub_of(source).read_file(source, revision, CONFIG_FILE)
    if text is None:
        raise ModelError(
            f"looking for the model's sizes: {source} has no {CONFIG_FILE}; expected a Hugging Face model folder"
        )
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ModelError(f"reading {CONFIG_FILE} of {source}: {error}") from error
