"""A backup of a home in use restores, under another path, what it held; a damaged one restores nothing."""

import sqlite3
from contextlib import closing

import pytest

from flows.ledger.home import home
from flows.servers.records import is_unsettled_copy
from flows.service.backup import BACKUPS, BLOBS, back_up, backup_names, restore
from flows.store import collect
from flows.store.store import Store
from stages.core.errors import StoreError


@pytest.fixture
def backups(store, recipe, make_plan, build, tmp_path, monkeypatch):
    """Provide the folder of a backup of a home with four artifacts, a database that is in use, and a key."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    build(make_plan(recipe()))
    (tmp_path / "ledger" / "night").mkdir(parents=True)
    (tmp_path / "ledger" / "night" / "ledger.jsonl").write_text("an event\n")
    (tmp_path / "servers.key").write_text("lifecycle:secret")
    store.make_folder(store.work_folder("train", "sft", "unfinished"))
    folder = tmp_path.with_name(f"{tmp_path.name}-backups")
    with closing(sqlite3.connect(tmp_path / "prefect.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE night (number)")
        database.execute("INSERT INTO night VALUES (1)")  # in the log yet, not in the database's own file
        back_up(folder)
        yield folder


def restored_to(folder, monkeypatch, backups, **options):
    monkeypatch.setenv("LIFECYCLE_HOME", str(folder))
    return restore(backups, **options)


def test_a_restored_home_has_artifacts_ledgers_and_databases_and_is_a_copy(backups, tmp_path, monkeypatch, recipe):
    elsewhere = tmp_path / "other" / "place"
    restored_to(elsewhere, monkeypatch, backups)
    verified = [*collect.verify(Store(elsewhere / "store"))]
    assert [one.whole for one in verified] == [True] * 4
    with closing(sqlite3.connect(elsewhere / "prefect.db")) as database:
        assert database.execute("SELECT number FROM night").fetchall() == [(1,)]
    assert (elsewhere / "ledger" / "night" / "ledger.jsonl").read_text() == "an event\n"
    assert is_unsettled_copy()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["ledger", "prefect.db", "servers.json", "store"]
    assert elsewhere.stat().st_mode & 0o77 == 0


def test_contents_are_kept_once_and_any_backup_can_be_restored(backups, tmp_path, monkeypatch):
    assert back_up(backups).new_bytes == 0
    ledger = tmp_path / "ledger" / "night" / "ledger.jsonl"
    ledger.write_text("an event\nanother\n")
    (tmp_path / "twin").write_text("an event\nanother\n")
    assert back_up(backups).new_bytes == len("an event\nanother\n")
    first, _, third = backup_names(backups)
    for name, text in ((first, "an event\n"), (third, "an event\nanother\n")):
        restored_to(tmp_path / name, monkeypatch, backups, name=name)
        assert (home() / "ledger" / "night" / "ledger.jsonl").read_text() == text


def test_nothing_is_restored_from_a_damaged_backup_or_over_a_home(backups, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="which exists"):
        restored_to(tmp_path, monkeypatch, backups)
    with pytest.raises(StoreError, match="found "):
        restored_to(tmp_path / "other", monkeypatch, backups, name="never")
    manifest = backups / BACKUPS / f"{backup_names(backups)[0]}.json"
    text = manifest.read_text()
    for path in ("../planted", "/tmp/planted"):
        manifest.write_text(text.replace("ledger/night/ledger.jsonl", path))
        with pytest.raises(StoreError, match="leads out of the home"):
            restored_to(tmp_path / "other", monkeypatch, backups)
    manifest.write_text(text)
    blob = next(path for path in (backups / BLOBS).glob("*/*") if path.read_bytes() == b"an event\n")
    for damage in (lambda: blob.write_bytes(b"an Event\n"), blob.unlink):
        damage()
        with pytest.raises(StoreError, match="restore an earlier backup"):
            restored_to(tmp_path / "other", monkeypatch, backups)
    assert not (tmp_path / "other").exists()
    assert [*tmp_path.glob(".other*")] == []


def test_a_home_is_not_backed_up_into_itself_and_none_is_an_error(backups, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="inside it"):
        back_up(tmp_path / "backups")
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="there is no home"):
        back_up(backups)
