"""A model's `config.json` without downloading the model, for what is to be planned before."""

from __future__ import annotations

import json
from typing import Any

from stages.core.errors import DownloadError, ModelError
from stages.download.builtin.catalog import BUILTINS
from stages.download.config import DownloadConfig
from stages.download.source import BuiltinSource, FileSource, HubSource

CONFIG_FILE = "config.json"
TIMEOUT_S = 30.0


def read_model_config(config: DownloadConfig, revision: str) -> dict[str, Any]:
    """Of the model that `config` would download at a resolved revision.

    Raises DownloadError when the hub does not give it, ModelError when the source has none.
    """
    source = config.source
    if isinstance(source, BuiltinSource):
        return dict(BUILTINS[source.name].sizes or {})
    text = _of_folder(source) if isinstance(source, FileSource) else _of_hub(source, revision)
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ModelError(f"reading {CONFIG_FILE} of {config.source_text}: {error}") from error


def _of_folder(source: FileSource) -> str:
    path = source.path / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"looking for the model's sizes: there is no {path}; expected a Hugging Face model folder")
    return path.read_text(encoding="utf-8")


def _of_hub(source: HubSource, revision: str) -> str:
    import httpx

    from stages.download import hub, modelscope

    snapshot = hub.list_snapshot(source, revision) if source.hub == "hf" else modelscope.list_snapshot(source)
    file = next((file for file in snapshot.files if file.name == CONFIG_FILE), None)
    if file is None:
        raise ModelError(f"looking for the model's sizes: {source} has no {CONFIG_FILE}; expected a model repository")
    try:
        answer = httpx.get(file.url, headers=snapshot.headers, follow_redirects=True, timeout=TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise DownloadError(f"fetching {CONFIG_FILE} of {source}: {error}; try again") from error
    return answer.text
