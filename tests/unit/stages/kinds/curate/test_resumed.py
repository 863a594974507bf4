"""A curate stage that is interrupted at any moment continues, and writes the bytes of an uninterrupted one."""

import json
import os

import pytest

from stages.core.contract import StageContext
from stages.core.worker_pool import worked
from stages.kinds.curate import judging, run
from stages.kinds.curate.config import CurateConfig
from tests.planted_rows import planted_duplicates

KEEP_EVERY, NUM_ROWS = 30, 200
STEPS = {
    "patterns": {"exclude": ["w77 "]},
    "redact": ["email"],
    "exact_duplicates": True,
    "near_duplicates": {},
    "held_out": {"fraction": 0.1},
    "on_bad_rows": "drop",
    "max_bad_row_fraction": 0.5,
}


class Interrupted(BaseException):
    """Error that interrupts a stage at a chosen moment, as Ctrl-C does."""


class Impatient(StageContext):
    """Stage context that interrupts its stage after a given number of progress reports."""

    def progress(self, done, total, unit, message=""):
        object.__setattr__(self, "left", getattr(self, "left", NEVER) - 1)
        if not self.left:
            raise Interrupted
        super().progress(done, total, unit, message)


NEVER = 10**6


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    rows = [json.dumps({"text": one}) for one in planted_duplicates(NUM_ROWS).texts]
    rows[3] = '{"text": 5}'
    rows[5] = json.dumps({"text": "Write to me@example.com about the seven seas."})
    rows[90] = "no JSON"
    for name, own in (("first", rows[:110]), ("second", rows[110:])):
        (folder / name / "data").mkdir(parents=True)
        (folder / name / "data" / "train.jsonl").write_text("\n".join(own) + "\n")
    return folder


def curated(work, datasets, interrupted_after=NEVER):
    config = CurateConfig.model_validate({"kind": "curate", "datasets": ["first", "second"], **STEPS})
    inputs = {name: datasets / name for name in ("first", "second")}
    work.mkdir(exist_ok=True)
    context = Impatient(work, "curated", "0" * 12, inputs, {}, work / "cache")
    object.__setattr__(context, "left", interrupted_after)
    return run.run(config, context)


def written(work):
    return {
        path.name: path.read_bytes()
        for path in [*work.glob("*.json*"), *(work / "data").iterdir()]
        if path.name not in ("config.json", "events.jsonl")
    }


@pytest.mark.parametrize("moment", [1, 5, 12, 25, 40])
def test_it_goes_on_where_it_was(tmp_path, datasets, monkeypatch, moment):
    monkeypatch.setattr(run, "KEEP_EVERY", KEEP_EVERY)
    monkeypatch.setattr(run, "PROGRESS_EVERY", 10)
    whole = curated(tmp_path / "whole", datasets)
    with pytest.raises(Interrupted):
        curated(tmp_path / "work", datasets, moment)
    again = curated(tmp_path / "work", datasets)
    assert again == whole
    assert written(tmp_path / "work") == written(tmp_path / "whole")
    events = (tmp_path / "work" / "events.jsonl").read_text()
    assert ("continuing after" in events) == (moment > KEEP_EVERY // 10 + 1)


def test_a_batch_of_long_rows_is_small(tmp_path):
    (tmp_path / "long" / "data").mkdir(parents=True)
    rows = [json.dumps({"text": "x" * length}) for length in [10] * 100 + [3 << 20] * 5]
    (tmp_path / "long" / "data" / "train.jsonl").write_text("\n".join(rows))
    config = CurateConfig.model_validate({"kind": "curate", "datasets": ["long"], "exact_duplicates": True})
    context = StageContext(tmp_path, "curated", "0" * 12, {"long": tmp_path / "long"}, {}, tmp_path / "cache")
    batches = list(judging.batches_of(config, context, 0))
    assert [(batch.number, len(batch.rows)) for batch in batches] == [(0, 64), (64, 38), (102, 2), (104, 1)]


@pytest.mark.parametrize(("processes", "interrupted"), [(2, True), (4, False)])
def test_several_processes_write_the_bytes_of_one(tmp_path, datasets, monkeypatch, processes, interrupted):
    whole = curated(tmp_path / "one", datasets)
    monkeypatch.setattr(judging, "BATCH_ROWS", 9)
    monkeypatch.setattr(judging, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(run, "KEEP_EVERY", KEEP_EVERY)
    monkeypatch.setattr(run, "PROGRESS_EVERY", 10)
    monkeypatch.setenv("OMP_NUM_THREADS", str(processes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    asked = []
    monkeypatch.setattr(judging, "worked", lambda *given: asked.append(given[2]) or worked(*given))
    if interrupted:
        with pytest.raises(Interrupted):
            curated(tmp_path / "several", datasets, 12)
    assert curated(tmp_path / "several", datasets) == whole
    assert asked == [processes] * (1 + interrupted)
    assert written(tmp_path / "several") == written(tmp_path / "one")
