"""`lifecycle gc` removes whatever lies in the store, and what it cannot remove does not stop the rest."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.planning.changes import keep_contents
from flows.store.store import Store
from stages.core.errors import StoreError

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
AS_ONE_WHO_OBEYS_MODES = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
READ_ONLY = 0o500


def collected(store: Store, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AS_ONE_WHO_OBEYS_MODES, LIFECYCLE, "gc", *options],
        env={**os.environ, "LIFECYCLE_HOME": str(store.root.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


def old(path: Path) -> Path:
    then_s = time.time() - 8 * 86_400
    for one in (path, *path.rglob("*")):
        os.utime(one, (then_s, then_s), follow_symlinks=False)
    return path


def read_only_tree(folder: Path) -> Path:
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("x")
    (folder / "below").chmod(READ_ONLY)
    folder.chmod(READ_ONLY)
    return folder


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "home" / "store")
    store.make_folder(store.root)
    return store


def test_files_links_read_only_trees_and_leftovers_of_removals_are_removed(store, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    keep_contents(store.cache_folder("contents"), "0" * 64, template)
    (note,) = store.cache_folder("contents").iterdir()
    link = store.make_folder(store.cache_folder("train")) / "link"
    link.symlink_to(tmp_path / "elsewhere")
    dead_link = link.with_name("dead-link")
    dead_link.symlink_to("/nowhere/at/all")
    (tmp_path / "elsewhere").mkdir()
    work = read_only_tree(store.root / ".work" / "train" / f"sft-{'a' * 12}")
    leftovers = [store.root / ".trash" / "note.json-0123abcd", read_only_tree(store.root / ".trash" / "sft-0123abcd")]
    leftovers[0].touch()
    for one in (note, link, dead_link, work):
        old(one)

    done = collected(store, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {note, link, dead_link, work, *leftovers}
    assert {Path(one["path"]) for one in json.loads(done.stdout)["garbage"]} == expected
    assert not [one for one in expected if os.path.lexists(one)]
    assert not [*(store.root / ".trash").iterdir()]
    assert (tmp_path / "elsewhere").is_dir(), "what a link leads to is not the store's"


def test_what_cannot_be_removed_is_named_and_the_rest_is_gone(store):
    stuck = store.make_folder(store.cache_folder("first")) / "stuck"
    free = store.make_folder(store.cache_folder("second")) / "free"
    for one in (stuck, free):
        one.touch()
        old(one)
    stuck.parent.chmod(READ_ONLY)

    done = collected(store)
    assert done.returncode == StoreError.exit_code
    assert str(free) in done.stdout
    assert not free.exists()
    assert "1 of what may go could not be removed" in done.stderr
    assert f"cannot remove {stuck}: Permission denied" in done.stderr
    assert json.loads(collected(store, "--json").stdout)["failures"]

    stuck.parent.chmod(0o700)
    assert collected(store).returncode == 0
    assert not stuck.exists()
