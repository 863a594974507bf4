"""Hashes of large files are cached, and hashing can be interrupted by Ctrl-C."""

import hashlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.core import hashing
from stages.core.errors import TransientError
from stages.core.hashing import ENTRY, MIN_CACHED_BYTES, digest_of_many, sha256_of_files

PROGRAM = """
import signal, sys
from pathlib import Path
from stages.core.hashing import sha256_of_files
for number in (signal.SIGINT, signal.SIGTERM):  # a job that a shell began in the background ignores Ctrl-C
    signal.signal(number, signal.default_int_handler)
print("begun", flush=True)
sha256_of_files({"big": Path(sys.argv[1])})
print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def large(tmp_path):
    """Provide a large file that was last modified a minute ago."""
    path = tmp_path / "large.bin"
    path.write_bytes(b"a" * MIN_CACHED_BYTES)
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Provide a function that overwrites all cached hashes, so that a test recognizes a hash from the cache."""
    monkeypatch.setattr(hashing, "SETTLED_S", -1)

    def mark():
        with sqlite3.connect(tmp_path / "home" / "cache" / "hashes.sqlite") as database:
            database.execute("UPDATE hashes SET sha256 = 'what was kept'")
            for folder, entries in database.execute("SELECT folder, entries FROM folders").fetchall():
                marked = b"".join(ENTRY.pack(*times, bytes(32)) for *times, _ in ENTRY.iter_unpack(entries))
                database.execute("UPDATE folders SET entries = ? WHERE folder = ?", (marked, folder))

    return mark


def test_hashes_are_those_of_the_standard_library(tmp_path, large):
    (tmp_path / "small").write_bytes(b"b")
    found = sha256_of_files({"x": large, "y": tmp_path / "small"})
    assert found == {
        "x": hashlib.sha256(large.read_bytes()).hexdigest(),
        "y": hashlib.sha256(b"b").hexdigest(),
    }


def test_a_file_that_did_not_change_is_not_read_again(large, kept):
    sha256_of_files({"x": large})
    kept()
    assert sha256_of_files({"other name": large}) == {"other name": "what was kept"}


def test_a_changed_file_is_read_again_also_when_size_and_time_are_put_back(large, kept):
    before = large.stat()
    sha256_of_files({"x": large})
    kept()
    large.write_bytes(b"b" * MIN_CACHED_BYTES)
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Again, as long as the kernel's clock, which ticks every few milliseconds, says the same of both changes.
    while large.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sha256_of_files({"x": large})["x"] == hashlib.sha256(b"b" * MIN_CACHED_BYTES).hexdigest()


def test_what_has_just_changed_is_not_kept(large, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_S", 600)  # a busy machine takes more than the two seconds until it is hashed
    large.write_bytes(b"b" * MIN_CACHED_BYTES)
    sha256_of_files({"x": large})
    assert b"large.bin" not in (Path(os.environ["LIFECYCLE_HOME"]) / "cache" / "hashes.sqlite").read_bytes()


def test_a_home_that_cannot_be_written_costs_time_only(large, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(large / "no folder"))
    assert sha256_of_files({"x": large})["x"] == hashlib.sha256(large.read_bytes()).hexdigest()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_when_it_is_asked_to(tmp_path, number):
    huge = tmp_path / "huge"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)
    command = [sys.executable, "-c", PROGRAM, huge]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"begun\n"
        time.sleep(0.5)
        process.send_signal(number)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == b"" and b"KeyboardInterrupt" in errors


def test_small_files_are_hashed_however_little_time_there_is(tmp_path):
    (tmp_path / "small").write_bytes(b"a")
    assert sha256_of_files({"x": tmp_path / "small"}, limit_s=0.0)["x"] == hashlib.sha256(b"a").hexdigest()
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(TransientError, match=r"hashing its 1\.0 GiB takes longer than 0 s"):
        sha256_of_files({"x": tmp_path / "large"}, limit_s=0.0)


def test_what_takes_long_says_how_far_it_is(large, monkeypatch, capsys):
    monkeypatch.setattr(hashing, "REPORT_INTERVAL_S", 0)
    sha256_of_files({"x": large})
    assert "hashing files from outside the store: 0.0 of 0.0 GiB" in capsys.readouterr().err


def test_many_small_files_are_read_once(tmp_path, kept):
    folder = tmp_path / "pictures"
    folder.mkdir()
    files = {f"{number}.png": folder / f"{number}.png" for number in range(hashing.MANY_FILES)}
    for name, path in files.items():
        path.write_text(name)
    first = sha256_of_files(files)
    assert first["7.png"] == hashlib.sha256(b"7.png").hexdigest()
    kept()
    files["7.png"].write_text("other")
    again = sha256_of_files(files)
    assert again.pop("7.png") == hashlib.sha256(b"other").hexdigest()
    assert {*again.values()} == {"00" * 32}


def test_the_digest_of_many_files_is_made_again_when_one_of_them_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_S", -1)
    files = [tmp_path / f"{number}.png" for number in range(hashing.MANY_FILES)]
    for path in files:
        path.write_text("same")
    os.utime(files[0], (-5, -5))  # a photograph from before 1970
    made = []

    def digest(source="pictures"):
        times = {path.name: hashing.times_of(path.stat()) for path in sorted(tmp_path.glob("*.png"))}
        return digest_of_many(source, times, lambda: made.append(source) or f"{len(made)}")

    assert [digest(), digest()] == ["1", "2"]  # none is kept while a time lies beyond what tells the next change
    os.utime(files[0], (5, 5))
    assert [digest(), digest(), digest("pictures of another recipe"), digest()] == ["3", "3", "4", "3"]
    times = files[7].stat()
    files[7].write_text("else")  # of the same size, and as old as before
    os.utime(files[7], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [digest(), digest()] == ["5", "5"]
    files[8].rename(tmp_path / "a.png")
    assert [digest(), digest()] == ["6", "6"]
    (tmp_path / "b.png").write_text("same")
    assert digest() == "7"
    (tmp_path / "b.png").unlink()
    assert digest() == "6"


def test_the_next_look_at_many_files_goes_on_where_the_limit_ended_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_S", -1)
    folder = tmp_path / "pictures"
    folder.mkdir()
    files = {f"{number}": folder / f"{number}" for number in range(1500)}
    for name, path in files.items():
        path.write_bytes(name.encode() * (1 << 14))
    left, found = [len(files) + 1], None
    while found is None and len(left) < 1000:
        try:
            found = sha256_of_files(files, limit_s=0.01)
        except TransientError as error:
            left.append(int(re.search(r"hashing its ([\d,]+) files", str(error))[1].replace(",", "")))
    assert found == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert len({*left}) > 2 and left == sorted(left, reverse=True)
