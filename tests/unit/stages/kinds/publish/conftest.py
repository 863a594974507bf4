"""Fixtures with a promoted model in a temporary store, which tests publish from their own process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from stages.remote import http
from tests.hub_server import HubServer, running_hub
from tests.published import Publishing, recipe_tree

Publish = Callable[..., Publishing]
TOKEN = "hf_token_of_the_tests"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def promoted(tmp_path: Path) -> Publish:
    """Provide a function that stores a promoted model, and plans the publish stage for it."""

    def make(to: str, number: int = 1, champion=(), mark: str = "first", **options) -> Publishing:
        folder = tmp_path / f"refresh-{number}"
        folder.mkdir()
        return Publishing(folder, recipe_tree(to, **options), mark, champion)

    return make


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Provide a fake hub that supports uploads by LFS only, as mirrors do; the client library would prefer Xet."""
    with running_hub() as server:
        server.token_roles = {TOKEN: "write", "hf_reader": "read"}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
        yield server
