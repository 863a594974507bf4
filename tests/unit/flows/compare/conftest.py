"""Rows and records of layout comparisons that were never run."""

import json

import pytest

from flows.compare.metrics import Row
from flows.ledger.events import CompareBegan, LayoutEntry, TrialEnded
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.record import RefreshRecord

TOKENS_PER_STEP = 100.0


@pytest.fixture
def make_row():
    def make(tokens_per_s, num_devices=1, global_batch_size=8, text=None, error=None, **metrics):
        metrics = {} if error else {"tokens_per_s": tokens_per_s, "step_time_s": 100 / tokens_per_s, **metrics}
        name = text or f"fsdp dp_shard={num_devices} {tokens_per_s:g}"
        return Row(name, "fsdp", num_devices, global_batch_size, {}, metrics, error)

    return make


@pytest.fixture
def make_trial(tmp_path):
    """Provide a function that makes a trial with given step times; the loss of step n is 1 / n."""

    def make(layout, round_number, times_s, profiled=None, **fields):
        steps = [
            {"step": float(n), "time_ms": n, "loss": 1 / n, "step_time_s": t, "tokens_per_s": TOKENS_PER_STEP / t}
            for n, t in enumerate(times_s, 1)
        ]
        if profiled is not None:
            steps[profiled]["communication_fraction"] = 0.25
        work = tmp_path / f"{layout}-{round_number}"
        work.mkdir()
        (work / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return TrialEnded(layout=layout, round=round_number, work=work, seconds=1.0, **fields)

    return make


@pytest.fixture
def make_record(tmp_path):
    def make(trials, num_layouts=2, batches=(8, 8)):
        layouts = tuple(
            LayoutEntry(
                text=f"layout {n}", engine="fsdp", num_devices=1, global_batch_size=batches[n], params={}, tags={}
            )
            for n in range(num_layouts)
        )
        return RefreshRecord(
            refresh="c",
            recipe="tiny",
            recipe_path=tmp_path,
            started_ms=1,
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            comparison=CompareBegan(stage="sft", num_steps=3, num_warmup_steps=1, num_rounds=2, layouts=layouts),
            trials=tuple(trials),
        )

    return make
