"""A cache entry is made once, even by concurrent processes, and never seen incomplete."""

import subprocess
import sys

import pytest

from stages.core.cache import cached_folder, content_key, is_intact, is_sealed, write_seal
from tests.damage import flip_bit

MAKER = """
import os, sys, time
from pathlib import Path
from stages.core.cache import cached_folder

def make(folder):
    time.sleep(0.3)
    (folder / "content").write_text(str(os.getpid()))

entry = cached_folder(Path(sys.argv[1]), "key", lambda entry: (entry / "content").exists(), make)
print((entry / "content").read_text())
"""


def is_complete(entry):
    return (entry / "content").exists()


def make(folder):
    (folder / "content").write_text("made")


def test_of_several_processes_one_makes_the_entry_and_all_find_it(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    makers = {process.communicate()[0].strip() for process in processes}
    assert len(makers) == 1
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_maker_leaves_nothing_behind(tmp_path):
    def fail(folder):
        make(folder)
        raise ValueError

    with pytest.raises(ValueError):
        cached_folder(tmp_path, "key", is_complete, fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_maker_left_behind_is_made_again(tmp_path):
    killed = (
        "import os, signal, sys; exec(sys.argv[2].replace('time.sleep(0.3)', 'os.kill(os.getpid(), signal.SIGKILL)'))"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path), MAKER])
    assert list(tmp_path.glob(".*.partial"))
    assert (cached_folder(tmp_path, "key", is_complete, make) / "content").read_text() == "made"
    assert not list(tmp_path.glob(".*.partial"))


def test_a_damaged_entry_is_made_again(tmp_path):
    entry = cached_folder(tmp_path, "key", is_complete, make)
    (entry / "content").rename(entry / "lost")
    assert is_complete(cached_folder(tmp_path, "key", is_complete, make))
    assert not (entry / "lost").exists()


def test_keys_differ_with_any_part_and_not_with_their_order():
    assert content_key({"a": 1, "b": None}) == content_key({"b": None, "a": 1})
    assert content_key({"a": 1}) != content_key({"a": "1"}) != content_key({"a": 1, "b": 2})


def test_a_seal_holds_for_what_was_written_and_for_nothing_else(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file"
    for path in (folder / "a", folder / "b", file):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"some bytes")
    assert not is_sealed(folder) and not is_intact(folder) and not is_intact(tmp_path / "none")
    for entry, inside in ((folder, folder / "b"), (file, file)):
        write_seal(entry)
        assert is_sealed(entry) and is_intact(entry)
        for number in range(len(b"some bytes")):
            flip_bit(inside, number)
            assert is_sealed(entry) and not is_intact(entry)
            flip_bit(inside, number)
        assert is_intact(entry)
    (folder / "c").touch()
    assert not is_intact(folder)
    (folder / "c").unlink()
    (folder / "a").unlink()
    assert not is_intact(folder)
