"""`file://` sources are copied exactly and identified by content hash; links out of their folder are not followed."""

import os
from pathlib import Path

import pytest

from stages.core.errors import DataError, DownloadError, ModelError
from stages.kinds.download.config import DownloadConfig
from tests.hub_repository import model_files
from tests.unit.stages.hubs.conftest import Download


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    for name, content in model_files(1000).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def revision(**config: object) -> str:
    return str(DownloadConfig.model_validate({"kind": "download", **config}).resolve_outside()["revision"])


def test_a_model_folder_is_copied_without_what_is_unsafe(outside: Path, download: Download, tmp_path: Path) -> None:
    result = download(model=f"file://{outside}")
    copied = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert copied == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (outside / "model.safetensors").read_bytes()
    assert result.metrics["num_files"] == 4


def test_a_single_data_file_keeps_its_name(tmp_path: Path, download: Download) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    download(dataset=f"file://{tmp_path}/rows.jsonl")
    assert (tmp_path / "data" / "rows.jsonl").read_text() == '{"text": "x"}\n'


def test_the_revision_follows_content_and_names_but_not_the_place_or_what_is_not_taken(outside: Path, tmp_path: Path):
    source = f"file://{outside}"
    first = revision(model=source)
    (outside / "pytorch_model.bin").write_bytes(b"changed")
    os.utime(outside / "config.json", (0, 0))
    moved = outside.rename(tmp_path / "moved")
    assert revision(model=f"file://{moved}") == first
    (moved / "README.md").rename(moved / "NOTES.md")
    renamed = revision(model=f"file://{moved}")
    (moved / "tokenizer.json").write_bytes(b"[]")
    assert len({first, renamed, revision(model=f"file://{moved}")}) == 3


def test_the_place_is_no_part_of_the_identity() -> None:
    identities = [DownloadConfig(kind="download", model=f"file:///{place}").identity() for place in "ab"]
    assert identities[0] == identities[1]


def test_links_within_the_folder_are_followed_and_links_out_of_it_refused(
    outside: Path, download: Download, tmp_path: Path
) -> None:
    (outside / "config.json").rename(outside / "true.json")
    (outside / "config.json").symlink_to("true.json")
    download(model=f"file://{outside}")
    assert not (tmp_path / "model" / "config.json").is_symlink()
    (outside / "stolen.json").symlink_to("/etc/passwd")
    with pytest.raises(DownloadError, match=r"stolen\.json.*leads out"):
        download(model=f"file://{outside}")
    (outside / "stolen.json").unlink()
    (outside / "stolen").symlink_to("/etc")
    with pytest.raises(DownloadError, match="leads out"):
        download(model=f"file://{outside}")


@pytest.mark.parametrize(
    ("target", "word"), [("loop", "leads nowhere, or to itself"), (".", "to the folder"), ("gone", "leads nowhere")]
)
def test_links_that_would_leave_something_out_or_never_end_are_refused(
    outside: Path, download: Download, target: str, word: str
) -> None:
    (outside / "loop").symlink_to(target)
    with pytest.raises(DownloadError, match=rf"loop is a link .*{word}"):
        download(model=f"file://{outside}")


def test_a_name_that_is_not_utf8_is_refused(outside: Path, download: Download) -> None:
    (outside / os.fsdecode(b"train-\xff.json")).write_text("{}")
    with pytest.raises(DownloadError, match=r"train-\\xff\.json' is not UTF-8; rename it"):
        download(model=f"file://{outside}")


def test_a_dataset_that_lacks_shards_is_refused_unless_they_are_named(tmp_path: Path, download: Download) -> None:
    folder = tmp_path / "source" / "data"
    folder.mkdir(parents=True)
    for number in (0, 2):
        (folder / f"train-{number:05}-of-00003.jsonl").write_text('{"text": "x"}\n')
    missing = r"of data/train-\*-of-00003\.jsonl, 2 of 3 shards are there; missing: 00001"
    with pytest.raises(DataError, match=rf"is not whole: {missing}"):
        download(dataset=f"file://{folder.parent}")
    download(dataset=f"file://{folder.parent}", files=["data/train-*"])
    assert "2 of 3 shards are there" in (tmp_path / "events.jsonl").read_text()
    (folder / "train-00001-of-00003.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "events.jsonl").unlink()
    download(dataset=f"file://{folder.parent}")
    assert "shards" not in (tmp_path / "events.jsonl").read_text()
    download(dataset=f"file://{folder}/train-00001-of-00003.jsonl")
    assert "1 of 3 shards are there; missing: 00000, 00002" in (tmp_path / "events.jsonl").read_text()


def test_pipes_are_refused_instead_of_read_forever(outside: Path, download: Download) -> None:
    os.mkfifo(outside / "pipe.json")
    with pytest.raises(DownloadError, match=r"pipe\.json.*not a regular file"):
        download(model=f"file://{outside}")


def test_what_changes_between_plan_and_download_is_noticed(
    outside: Path, tmp_path: Path, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = DownloadConfig(kind="download", model=f"file://{outside}").resolve_outside()
    (outside / "README.md").write_text("changed")
    monkeypatch.setattr(DownloadConfig, "resolve_outside", lambda self: planned)
    with pytest.raises(DownloadError, match="changed after"):
        download(model=f"file://{outside}")


@pytest.mark.parametrize(
    ("kind", "files", "error", "word"),
    [
        ("model", {}, DownloadError, "empty"),
        ("model", {"config.json": b"{}"}, ModelError, "no weights"),
        ("model", {"config.json": b"{}", "model.bin": b""}, ModelError, "any code"),
        ("model", {**model_files(10), "model.safetensors": b"cut"}, ModelError, "damaged"),
        ("dataset", {"archive.zip": b""}, DataError, "not unpacked"),
        ("dataset", {"dataset_infos.json": b"{}"}, DataError, "no data files"),
    ],
)
def test_unusable_folders_are_refused(kind, files, error, word: str, tmp_path: Path, download: Download) -> None:
    folder = tmp_path / "source"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)
    with pytest.raises(error, match=word):
        download(**{kind: f"file://{folder}"})


def test_a_missing_path_is_named(download: Download) -> None:
    with pytest.raises(DownloadError, match="/nowhere/model does not exist"):
        download(model="file:///nowhere/model")


def test_media_come_where_the_recipe_asks_for_them(download: Download, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "images").mkdir(parents=True)
    (folder / "train.jsonl").write_text("{}\n")
    media = {"a.PNG", "b.mp4", "c.webm", "d.wav", "e.Mp3"}
    for name in media:
        (folder / "images" / name).write_bytes(b"a")
    source = f"file://{folder}"
    before = revision(dataset=source), revision(dataset=source, media=True)
    (folder / "images" / "a.PNG").write_bytes(b"b")
    assert revision(dataset=source) == before[0]
    assert revision(dataset=source, media=True) != before[1]
    download(dataset=source, media=True)
    assert {path.name for path in (tmp_path / "data").rglob("*.*")} == {"train.jsonl", *media}
