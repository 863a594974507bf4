"""Storing an artifact is all or nothing, only one process builds each artifact, and `gc` removes it whole."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.launch import hook
from flows.planning.changes import keep_contents
from flows.store.collect import verify
from flows.store.content import PENDING_RECORD_FILE, FileEntry, damage_of
from flows.store.store import Store
from stages.core.errors import ResourceError, StoreError

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
AS_ONE_WHO_OBEYS_MODES = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
READ_ONLY = 0o500


@pytest.fixture
def built(recipe, make_plan, build):
    return build(make_plan(recipe()))


def test_a_committed_artifact_is_found_with_its_record(store, built):
    found = store.find("train", built["sft"].record.version)
    assert found == built["sft"]
    assert found.record.upstream["model"].digest == built["base"].record.digest
    assert store.index().find("train", found.record.version).folder == found.folder
    assert not list((store.root / ".work").glob("*/*"))


def test_an_artifact_of_an_earlier_version_whose_record_says_more_is_found(store, built):
    file = built["sft"].folder / "record.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {"loss": 1.0}, "mlflow_run_id": "a1"}))
    found = store.find("train", built["sft"].record.version).record
    assert found == built["sft"].record.model_copy(update={"mlflow_run_id": "a1"})


@pytest.mark.parametrize("text", ["", "{", '{"schema_number": 1}', '{"schema_number": 99}'])
def test_a_torn_record_is_no_artifact(store, built, text):
    (built["sft"].folder / "record.json").write_text(text)
    assert store.find("train", built["sft"].record.version) is None
    assert store.index().leftovers == (built["sft"].folder,)


def test_a_folder_without_record_is_no_artifact_and_gives_way_to_a_new_build(store, built, recipe, make_plan, build):
    (built["sft"].folder / "record.json").unlink()
    (built["sft"].folder / "stray").write_text("of the old build")
    again = build(make_plan(recipe()))["sft"]
    assert again.folder == built["sft"].folder
    assert not (again.folder / "stray").exists()


def test_a_commit_that_was_interrupted_before_its_last_step_is_finished(store, built):
    folder, version = built["sft"].folder, built["sft"].record.version
    (folder / "record.json").rename(folder / PENDING_RECORD_FILE)
    assert store.find("train", version) is None
    store.recover("train", version)
    assert store.find("train", version).record == built["sft"].record


def test_the_record_is_written_last(store, built, monkeypatch):
    """No artifact is left in the store if writing its record, the last step of storing it, fails."""
    record = built["sft"].record
    work = store.make_folder(store.work_folder("train", "sft", "0" * 12))
    (work / "model").mkdir()
    store.remove(built["sft"].folder)
    replace = type(work).replace

    def fail_on_record(path, target):
        if target.name == "record.json":
            raise OSError(errno.EIO, "Input/output error", str(target))
        return replace(path, target)

    monkeypatch.setattr(type(work), "replace", fail_on_record)
    with pytest.raises(StoreError, match=r"cannot commit sft-.*Input/output error"):
        store.commit(work, record)
    assert store.find("train", record.version) is None


def test_a_full_disk_is_a_resource_error_that_says_what_to_do(store, built, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    work = store.make_folder(store.work_folder("train", "sft", "0" * 12))
    with pytest.raises(ResourceError, match=r"the disk of .* is full .*; .*`lifecycle gc`"):
        store.commit(work, built["sft"].record)
    assert store.find("train", built["sft"].record.version) is not None


def test_a_store_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create"):
        Store(tmp_path / "file" / "store").make_folder(tmp_path / "file" / "store" / "train")


def test_nobody_else_can_look_into_the_store(store, built):
    assert store.root.stat().st_mode & 0o077 == 0


def test_missing_and_shortened_files_are_seen_without_reading_them(store, built):
    (built["sft"].folder / "model" / "content").unlink()
    (built["base"].folder / "model" / "content").write_text("")
    assert store.find("train", built["sft"].record.version).damage == ("model/content is missing",)
    assert store.find("download", built["base"].record.version).damage == ("model/content has 0 bytes instead of 12",)
    gone = built["sft"].record.files
    assert damage_of(store.root / "nowhere", gone) == tuple(f"{name} is missing" for name in gone)


def test_an_artifact_bears_the_mark_of_its_hook_until_that_was_completed(store, built):
    hook.mark(built["sft"].folder, "train")
    assert not store.find("train", built["sft"].record.version).pending
    hook.mark(built["sft"].folder, "promote")
    assert store.find("train", built["sft"].record.version).pending
    assert all(one.whole for one in verify(store))
    store.remove_mark(built["sft"].folder)
    assert store.find("train", built["sft"].record.version) == built["sft"]


def test_a_lock_is_held_by_one_and_handed_on(store):
    order = []
    first_has_it, second_waits = threading.Event(), threading.Event()

    def hold():
        with store.lock("train", "0" * 12, lambda: None):
            first_has_it.set()
            second_waits.wait()
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    first_has_it.wait()
    assert store.is_locked("train", "0" * 12)
    with store.lock("train", "0" * 12, second_waits.set):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert not store.is_locked("train", "0" * 12)


def test_the_lock_of_a_killed_process_is_free(store):
    code = (
        "import sys, time; from pathlib import Path; from flows.store.store import Store\n"
        "with Store(Path(sys.argv[1])).lock('train', '0' * 12, lambda: None): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(store.root)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    assert store.is_locked("train", "0" * 12)
    process.kill()
    process.wait()
    with store.lock("train", "0" * 12, lambda: pytest.fail("the lock of a dead process is held")):
        pass


def test_a_thousand_artifacts_are_indexed_within_a_second(store, built, capsys):
    template = built["sft"].record
    names = ["model/config.json", "model/model.safetensors", "model/tokenizer.json", "result.json"]
    files = {name: FileEntry(size=0, sha256="0" * 64) for name in names}
    changes = {"stage": "many", "version": "VERSION", "files": files, "finished": datetime.now(UTC)}
    text = template.model_copy(update=changes).model_dump_json()
    for number in range(1000):
        folder = store.folder_of("train", "many", f"{number:012x}")
        (folder / "model").mkdir(parents=True)
        for name in names:
            (folder / name).touch()
        (folder / "record.json").write_text(text.replace("VERSION", f"{number:012x}"))
    started_s = time.process_time()  # the machine may be busy with something else
    index = store.index()
    seconds = time.process_time() - started_s
    started_s = time.process_time()
    nearest = index.nearest("train", "many", {**template.identity, "stage_version": 0})
    nearest_seconds = time.process_time() - started_s
    with capsys.disabled():
        print(f"\nindex of 1,000 artifacts: {seconds:.2f} s; nearest of them: {nearest_seconds:.2f} s")
    assert len(index.artifacts) == 1000 + len(built)
    assert nearest.record.stage == "many"
    assert seconds + nearest_seconds < 1.0


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
