"""A new hub needs a module and a line in the registry of hubs; then download stages can use it."""

import functools
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.hubs.hub import parse_repository
from stages.hubs.registry import HUBS, HubEntry, read_model_config
from stages.kinds.download.config import DownloadConfig
from tests.hub_repository import model_files
from tests.unit.stages.hubs.conftest import Download


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the folder of a model repository, which a web server serves as a new kind of hub."""
    folder = tmp_path / "served" / "org" / "tiny"
    write_repository(folder, model_files(1000))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("INDEX_HUB", f"http://127.0.0.1:{server.server_port}")
        entry = HubEntry("index://", "org/name", parse_repository, "tests.unit.stages.hubs.index_hub")
        monkeypatch.setitem(HUBS, "index", entry)
        yield folder
        server.shutdown()


def write_repository(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    index = {name: [len(content), hashlib.sha256(content).hexdigest()] for name, content in files.items()}
    (folder / "index.json").write_text(json.dumps(index))


def test_a_download_takes_a_model_from_a_hub_that_was_only_registered(
    served: Path, download: Download, tmp_path: Path
) -> None:
    result = download(model="index://org/tiny")

    taken = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert taken == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert all((tmp_path / "model" / name).read_bytes() == (served / name).read_bytes() for name in taken)
    assert result.tags["source"] == "index://org/tiny"


def test_its_content_is_the_version_and_its_name_the_identity(served: Path) -> None:
    config = DownloadConfig(kind="download", model="index://org/tiny")
    first = config.resolve_outside()
    write_repository(served, {**model_files(1000), "README.md": b"# Changed"})

    assert config.resolve_outside() != first
    assert config.identity()["model"] == "index://org/tiny"


def test_its_models_config_is_read_without_a_download(served: Path) -> None:
    config = DownloadConfig(kind="download", model="index://org/tiny")
    assert read_model_config(config.source, "any") == json.loads(model_files(1000)["config.json"])


def test_messages_name_it_among_what_is_allowed(served: Path) -> None:
    with pytest.raises(ValueError, match="index://org/name"):
        DownloadConfig.model_validate({"kind": "download", "model": "idx://org/tiny"})
