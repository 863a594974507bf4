"""Training on a streamed dataset gives the weights of training on a local copy, and leaves no copy behind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.kinds.download import run as download
from stages.kinds.download.config import DownloadConfig
from stages.kinds.train.run import run
from tests.hub_server import HubServer, running_hub
from tests.s3_server import S3Server, running_s3
from tests.train_stage import make_artifacts, make_config, make_context

DATA = {"dataset": "rows", "evaluation_split": "validation", "sequence_length": 64}
BEYOND_ASCII = " — ¿qué tal, 東京?"
"""Text that only dataset rows contain, so that copies of rows are found by it."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def files(artifacts: dict[str, Path]) -> dict[str, bytes]:
    """Provide the files of a dataset, as content by name."""
    found = {}
    for path in (artifacts["problems"] / "data").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["messages"][0]["content"] += BEYOND_ASCII
        found[path.name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    return found


@pytest.fixture(scope="module")
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    with pytest.MonkeyPatch.context() as environment, running_hub() as server:
        environment.setenv("HF_ENDPOINT", server.url)
        environment.setenv("HF_TOKEN", "token-of-the-test")
        repository = server.repository("datasets/org/chats")
        repository.token = "token-of-the-test"
        repository.commit(files)
        yield server


@pytest.fixture(scope="module")
def s3(files: dict[str, bytes]) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as environment, running_s3(environment) as server:
        server.put({f"chats/{name}": content for name, content in files.items()})
        yield server


def trained(home: Path, artifacts: dict[str, Path], source: str, *, stream: bool) -> bytes:
    """Run a download and a train stage in `home`, which has its own cache, and return the trained weights."""
    rows = DownloadConfig(kind="download", dataset=source, stream=stream)
    (home / "rows").mkdir(parents=True)
    download.run(rows, make_context(home / "rows", {}, make_config()))
    config = make_config(data=DATA, steps=2)
    run(config, make_context(home / "trained", {**artifacts, "rows": home / "rows"}, config))
    return (home / "trained" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def on_a_copy(hub: HubServer, artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Provide the weights that training on a local copy of the dataset gives."""
    home = tmp_path_factory.mktemp("copied")
    weights = trained(home, artifacts, "hf://datasets/org/chats", stream=False)
    assert copies_below(home) == {"train.jsonl", "validation.jsonl"}, "or no copy would be found"
    return weights


def copies_below(folder: Path) -> set[str]:
    """Return the names of all files in a folder that contain text of a dataset row."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name for path in files if BEYOND_ASCII.encode() in path.read_bytes()}


@pytest.mark.parametrize("source", ["hf://datasets/org/chats", "s3://lake/chats"])
def test_weights_are_those_of_a_training_on_the_copy(
    hub: HubServer, s3: S3Server, artifacts: dict[str, Path], on_a_copy: bytes, tmp_path: Path, source: str
) -> None:
    assert trained(tmp_path, artifacts, source, stream=True) == on_a_copy
    assert copies_below(tmp_path) == set()
    assert {path.name for path in (tmp_path / "rows" / "data").iterdir()} == {
        "train.jsonl.pointer",
        "validation.jsonl.pointer",
    }
