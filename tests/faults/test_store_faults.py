"""A store that is damaged, read-only, full, old or in use is reported, and later refreshes work as usual."""

import os
import re
import subprocess
from pathlib import Path

import chain
import pytest
import tiny
from disks import filled, mounted, needs_root, small_disk

from flows.running.runner import run_stage
from flows.store.collect import collect, find_garbage, verify
from flows.store.store import Store
from stages.core.errors import ResourceError

FAR_FUTURE_S = 4_102_444_800  # the year 2100
LONG_AGO_S = 31_536_000  # the year 1971


def refusal(root: Path) -> str:
    """Run a refresh that must fail, and return the last line of its error output."""
    process = chain.start(root)
    _, errors = process.communicate(timeout=tiny.PATIENCE_S)
    assert process.returncode != 0
    return errors.splitlines()[-1]


def states(done: dict[str, dict[str, object]]) -> list[object]:
    return [done[name]["state"] for name in chain.STAGES]


def artifact(root: Path, stage: str) -> Path:
    return next(root.glob(f"*/{stage}-*"))


def test_a_torn_record_is_no_artifact_and_is_built_again(tmp_path, undisturbed, fault):
    fault.name, fault.stage = "torn record.json", "sft"
    chain.run_refresh(tmp_path)
    record = artifact(tmp_path, "sft") / "record.json"
    record.write_bytes(record.read_bytes()[:100])
    with fault.timed("detected"):
        assert Store(tmp_path).index().leftovers == (record.parent,)
    with fault.timed("recovered"):
        again = chain.run_refresh(tmp_path)
    assert states(again) == ["cached", "cached", "built", "cached", "cached"], "what stands on it has the same content"
    assert chain.identities(again) == undisturbed(1)
    fault.lost = "the stage"


@pytest.mark.parametrize("kind", ["cut off", pytest.param("bits flipped", marks=pytest.mark.nightly)])
def test_a_corrupted_file_of_a_model_is_named_and_rebuilt_on_request(tmp_path, undisturbed, fault, kind):
    fault.name, fault.stage = f"weights {kind}", "sft"
    chain.run_refresh(tmp_path)
    weights = artifact(tmp_path, "sft") / "model" / "content"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] if kind == "cut off" else bytes([content[0] ^ 1]) + content[1:])
    with fault.timed("detected"):
        (damaged,) = [verdict for verdict in verify(Store(tmp_path)) if not verdict.whole]
    assert (damaged.artifact.record.stage, damaged.damaged) == ("sft", ("model/content",))
    if kind == "cut off":
        assert "model/content has 63 bytes instead of 64; run again with `--force sft`" in refusal(tmp_path)
    with fault.timed("recovered"):
        Store(tmp_path).remove(weights.parents[1])
        again = chain.run_refresh(tmp_path)
    assert chain.identities(again) == undisturbed(1)
    fault.lost = "the stage"


@pytest.mark.parametrize(
    "time_s", [FAR_FUTURE_S, pytest.param(LONG_AGO_S, marks=pytest.mark.nightly)], ids=["future", "past"]
)
def test_a_clock_that_jumps_costs_nothing(tmp_path, undisturbed, fault, time_s):
    fault.name, fault.stage = f"clock jumps to {'2100' if time_s == FAR_FUTURE_S else '1971'} and back", "sft"
    process = chain.start(tmp_path, held="sft")
    tiny.eventually(lambda: chain.step_of(tmp_path, "sft") >= 2, "no steps")
    process.kill()
    process.communicate()
    tiny.eventually(lambda: not tiny.processes_of(Store(tmp_path)), "processes are left")
    reached = chain.step_of(tmp_path, "sft")
    for path in tmp_path.rglob("*"):
        os.utime(path, (time_s, time_s))
    with fault.timed("recovered"):
        again = chain.run_refresh(tmp_path)
    assert again["sft"]["first_step"] == reached
    assert chain.identities(again) == undisturbed(1)
    assert states(chain.run_refresh(tmp_path)) == ["cached"] * len(chain.STAGES)
    assert find_garbage(Store(tmp_path)) == [], "what a refresh needs is no garbage, whatever the clock says"


def test_of_two_schedulers_at_once_each_stage_is_built_by_one(tmp_path, undisturbed, fault):
    fault.name, fault.stage = "two schedulers at once", "all"
    with fault.timed("recovered"):
        first, second = [chain.finish(process) for process in [chain.start(tmp_path), chain.start(tmp_path)]]
    assert chain.identities(first) == chain.identities(second) == undisturbed(1)
    for name in chain.STAGES:
        assert sorted([first[name]["state"], second[name]["state"]]) == ["built", "cached"]


@needs_root
def test_a_store_on_a_read_only_file_system_serves_what_it_has(tmp_path, undisturbed, fault):
    fault.name, fault.stage = "read-only file system", "sft"
    store = tmp_path / "store"
    chain.run_refresh(store)
    whole = states(chain.run_refresh(store))
    Store(store).remove(artifact(store, "scores"))
    with mounted(store, "--bind", str(store)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(store)], check=True)
        with fault.timed("detected"):
            said = refusal(store)
        assert "StoreError: cannot " in said
        assert "Read-only file system" in said
    with fault.timed("recovered"):
        again = chain.run_refresh(store)
    assert whole == ["cached"] * len(chain.STAGES)
    assert states(again) == [*whole[:-1], "built"]
    assert chain.identities(again) == undisturbed(1)


@needs_root
@pytest.mark.parametrize(
    "stage", ["sft", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("base", "awq", "scores"))]
)
def test_a_disk_that_is_full_while_a_stage_writes_is_named_and_costs_nothing(tmp_path, undisturbed, fault, stage):
    fault.name, fault.stage = "disk full", stage
    disk = tmp_path / "disk"
    with small_disk(disk, 4):
        process = chain.start(disk / "store", held=stage, release=tmp_path / "release")
        tiny.eventually(lambda: chain.step_of(disk / "store", stage) >= 2, "no steps")
        with fault.timed("detected"), filled(disk):
            (tmp_path / "release").touch()
            _, errors = process.communicate(timeout=tiny.PATIENCE_S)
        assert process.returncode != 0
        is_told = r"ResourceError: .*: the disk of \S+ is full \(\d\.\d MiB are free now.*\); .*`lifecycle gc`"
        assert re.search(is_told, errors), errors
        reached = chain.step_of(disk / "store", stage)
        with fault.timed("recovered"):
            again = chain.run_refresh(disk / "store")
    assert 2 <= reached == again[stage]["first_step"]
    assert chain.identities(again) == undisturbed(1)
    fault.lost = f"nothing: went on at step {reached} of {chain.NUM_STEPS}"


@needs_root
def test_a_disk_that_a_model_does_not_fit_on_is_named_in_one_message(tmp_path, fault, monkeypatch):
    """A model too large for the disk fails its stage with one message that names the disk, unlike safetensors'."""
    fault.name, fault.stage = "disk full while weights are written", "download"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with small_disk(tmp_path / "disk", 2):
        store = Store(tmp_path / "disk" / "store")
        (planned,) = tiny.planned_stages(store, {"base": {"kind": "download", "model": "builtin/qwen3-1m"}}).values()
        with fault.timed("detected"), pytest.raises(ResourceError) as error:
            run_stage(planned, {}, store, tiny.Notes())
    expected = r"running .*: the disk of \S+ is full \(\d\.\d MiB are free now\); free some space, .*`lifecycle gc`.*"
    assert re.match(expected, str(error.value)), error.value
    assert str(error.value).count("is full") == 1


@needs_root
def test_garbage_is_collected_on_a_disk_without_any_room(tmp_path, fault):
    """Garbage collection, as the full-disk error advises, works without room for its trash folder."""
    fault.name, fault.stage = "disk full while garbage is collected", "none"
    store = Store(tmp_path / "disk" / "store")
    with small_disk(tmp_path / "disk", 4):
        abandoned = store.make_folder(store.work_folder("train", "sft", "a" * 12)) / "weights"
        abandoned.write_bytes(b"\0" * 2**20)
        os.utime(abandoned, (LONG_AGO_S, LONG_AGO_S))
        os.utime(abandoned.parent, (LONG_AGO_S, LONG_AGO_S))
        with filled(tmp_path / "disk"), fault.timed("recovered"):
            done = collect(store, find_garbage(store))
        assert [one.path for one in done.removed] == [abandoned.parent]
        assert done.failures == ()
