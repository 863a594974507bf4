"""Cache entries are removed only if unused for long, also on disks without access times."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from flows.planning.changes import keep_contents, kept_contents
from flows.store.collect import collect, find_garbage
from flows.store.store import Store
from stages.core.cache import is_intact, note_use_of_file, write_seal
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts
from stages.serving import engine
from tests.unit.stages.data.reports import Reports

DAY_S = 86_400


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "home" / "store")


def aged(folder: Path, days: float) -> None:
    """Set access and modification times of all files to the same past time, as on a disk without access times."""
    then_s = time.time() - days * DAY_S
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then_s, then_s))


def entries(room: Path) -> set[Path]:
    return {path for path in room.iterdir() if not path.name.startswith(".")}


def test_tokens_of_old_rows_go_while_those_of_every_night_stay(store, tmp_path, tokenizer_folder):
    cache = store.make_folder(store.cache_folder("train"))

    def prepared(night: int) -> Path:
        rows = tmp_path / f"night-{night}"
        rows.mkdir(exist_ok=True)
        (rows / "rows.jsonl").write_text(json.dumps({"prompt": f"{night} + 1", "completion": str(night + 1)}) + "\n")
        return prepare(
            rows,
            DataConfig(dataset="data", sequence_length=64),
            ModelFacts(tokenizer_folder),
            rows="examples",
            cache=cache,
            report=Reports(),
            bad_rows_file=tmp_path / "bad.jsonl",
        ).training.folder

    folders = [prepared(night) for night in range(10)]
    aged(cache, days=30)
    assert prepared(3) == folders[3], "found, not made again"
    collected = collect(store, find_garbage(store))
    assert collected.failures == ()
    assert entries(cache / "tokenized") == {folders[3]}
    assert entries(cache / "pieces") == set()
    assert prepared(0) == folders[0], "made again"


def test_sealed_files_stay_with_their_seals(store):
    room = store.make_folder(store.cache_folder("train") / "teacher")
    used, unused = room / "used.npy", room / "unused.npy"
    for file in (used, unused):
        file.write_bytes(b"array")
        write_seal(file)
    aged(room, days=30)
    assert is_intact(used)
    collect(store, find_garbage(store))
    assert entries(room) == {used, room / "used.npy.sha256"}


def test_notes_and_answers_of_parsers_that_are_read_stay(store, tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(store.root.parent))
    answered = [sys.executable, "-c", "print('[]')"]

    def ask(version: str) -> object:
        return engine.problems_by_parser("vllm", version, answered, {})

    assert ask("1") == ask("2") == []
    notes = store.cache_folder("contents")
    for digest in ("read", "unread"):
        keep_contents(notes, digest, tmp_path / "home")
    aged(store.root.parent, days=30)
    assert ask("2") == []
    assert kept_contents(notes, "read") is not None
    collect(store, find_garbage(store, rooms=store.root.parent.glob("cache/*/")))
    assert [path.name for path in entries(notes)] == ["read.json"]
    assert len(entries(store.root.parent / "cache" / "vllm-arguments")) == 1


def test_of_what_hugging_face_prepared_each_configuration_is_an_entry(store):
    room = store.make_folder(store.cache_folder("evaluate") / "datasets")
    for name in ("json/default-1/0.0.0/abc/rows.arrow", "json/default-2/0.0.0/abc/rows.arrow", "a.lock"):
        file = room / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    aged(room, days=30)
    note_use_of_file(room, room / "json/default-2/0.0.0/abc/rows.arrow")
    note_use_of_file(room, Path("/elsewhere/rows.arrow"))
    collect(store, find_garbage(store))
    assert {path.name for path in room.rglob("*")} == {"json", "default-2", "0.0.0", "abc", "rows.arrow"}


def test_what_a_refresh_may_still_read_that_has_run_for_weeks_stays(store):
    room = store.make_folder(store.cache_folder("serve") / "servers")
    of_refresh, older = room / "of-a-refresh", room / "older"
    for folder, days in ((of_refresh, 19), (older, 21)):
        folder.mkdir()
        aged(folder, days)
    collect(store, find_garbage(store, refreshing_since_s=time.time() - 20 * DAY_S))
    assert entries(room) == {of_refresh}
