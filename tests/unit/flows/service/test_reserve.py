"""A file that reserves disk space is deleted when the disk is full, so that databases work, and made again later."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from flows.service.reserve import LOW_BYTES, PLENTY_BYTES, RESERVE_BYTES, keep_reserve, reserve_file
from tests.faults.disks import filled, needs_root, small_disk

DISK_MIB = (PLENTY_BYTES + 2 * RESERVE_BYTES) >> 20


@needs_root
def test_a_full_disk_gets_the_reserve_and_a_database_on_it_can_be_written_again(tmp_path, monkeypatch, capsys):
    with small_disk(tmp_path / "disk", DISK_MIB):
        monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "disk"))
        keep_reserve()
        assert reserve_file().stat().st_blocks * 512 == RESERVE_BYTES
        with closing(sqlite3.connect(tmp_path / "disk" / "states.db")) as states:
            states.execute("PRAGMA journal_mode=WAL")
            states.execute("CREATE TABLE states (body BLOB)")
            states.commit()
            with filled(tmp_path / "disk"):
                keep = ("INSERT INTO states VALUES (zeroblob(?))", (LOW_BYTES,))
                with pytest.raises(sqlite3.OperationalError, match="full"):
                    states.execute(*keep)
                    states.commit()
                states.rollback()
                keep_reserve()
                keep_reserve()  # no room to make it again
                states.execute(*keep)
                states.commit()
        assert capsys.readouterr().out.count("is full") == 1
        assert not reserve_file().exists()
        keep_reserve()
        assert reserve_file().exists()


@needs_root
def test_a_small_disk_has_no_reserve(tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", 2 * RESERVE_BYTES >> 20):
        monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "disk"))
        keep_reserve()
        assert shutil.disk_usage(tmp_path / "disk").used < RESERVE_BYTES
