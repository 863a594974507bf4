"""Fixtures of the hub tests: a fake server of Hugging Face and ModelScope, and download stages in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.core.contract import StageContext, StageResult
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run
from stages.remote import http
from tests.hub_server import HubServer, running_hub

Download = Callable[..., StageResult]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        for variable in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
        yield server


@pytest.fixture
def download(tmp_path: Path) -> Download:
    """Provide a function that runs a download stage with a given config, and writes into `tmp_path`."""

    def start(**config: object) -> StageResult:
        checked = DownloadConfig.model_validate({"kind": "download", **config})
        outside = checked.resolve_outside()
        return run(checked, StageContext(tmp_path, "base", "0" * 12, {}, {}, tmp_path / "cache", outside))

    return start
