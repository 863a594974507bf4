"""Rows and records of comparisons that never ran."""

import pytest

from flows.compare.figures import Row
from flows.compare.record import ComparisonRecord, LayoutEntry, TrialEntry
from flows.ledger.process_identity import ProcessIdentity

TOKENS_PER_STEP = 100.0


@pytest.fixture
def make_row():
    def make(tokens_per_s, num_devices=1, global_batch_size=8, text=None, error=None, **metrics):
        figures = {} if error else {"tokens_per_s": tokens_per_s, "step_time_s": 100 / tokens_per_s, **metrics}
        name = text or f"fsdp dp_shard={num_devices} {tokens_per_s:g}"
        return Row(name, "fsdp", num_devices, global_batch_size, {}, figures, error)

    return make


@pytest.fixture
def make_trial():
    """A trial whose steps took these times; the loss of step n is 1 / n."""

    def make(layout, round_number, times_s, **fields):
        steps = [
            {"step": float(n), "time_ms": n, "loss": 1 / n, "step_time_s": t, "tokens_per_s": TOKENS_PER_STEP / t}
            for n, t in enumerate(times_s, 1)
        ]
        return TrialEntry(layout=layout, round=round_number, started_ms=1, seconds=1.0, steps=steps, **fields)

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
        return ComparisonRecord(
            comparison="c",
            recipe="tiny",
            recipe_path=tmp_path,
            stage="sft",
            num_steps=3,
            num_warmup_steps=1,
            num_rounds=2,
            started_ms=1,
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            layouts=layouts,
            trials=tuple(trials),
        )

    return make
