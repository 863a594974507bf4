"""Notifications contain the promotion's decision, the scores and the errors of a pipeline run."""

import json

import pytest
from prefect.logging import disable_run_logger

from flows.ledger.events import (
    AttemptBegan,
    AttemptEnded,
    RefreshEnded,
    StageCached,
    StageFailed,
)
from flows.ledger.record import after, fold
from flows.running.refresh import build_stage, final_state
from flows.service.notifications import STATES
from stages.core.errors import RefreshStoppedError
from stages.kinds.promote.verdict import TABLE_FILE, VERDICT_FILE, Verdict
from tests.beginnings import beginning

MISSED = "regression of sums.exact_match (standard errors) 6.514 > 2, missed by 4.514"


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Provide a function that makes the record of a refresh with a given outcome of its promotion."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))

    def judged(outcome, missed=()):
        verdict = Verdict(
            outcome=outcome, name="adder", champion_version="1", against="champion (version 1)", missed=missed
        )
        (tmp_path / VERDICT_FILE).write_text(verdict.model_dump_json())
        (tmp_path / TABLE_FILE).write_text("| gate |")
        state = "not_promoted" if missed else "completed"
        return fold(
            [
                *began(tmp_path, "scores", "promote"),
                *built(tmp_path, "scores", {"sums.exact_match": 0.6, "sums.exact_match_stderr": 0.04}),
                *built(tmp_path, "promote", {}, verdict=outcome),
                RefreshEnded(state=state, seconds=30.0),
            ]
        )

    return judged


def began(folder, *stages):
    kinds = {"scores": "evaluate", "promote": "promote", "rows": "download"}
    yield beginning(folder, {name: kinds[name] for name in stages})


def built(folder, stage, metrics, **tags):
    yield AttemptBegan(stage=stage, number=1, work=folder, first_byte=0, params={}, tags={})
    ended = {"stage": stage, "number": 1, "folder": folder, "last_byte": 0, "metrics": metrics, "tags": tags}
    yield AttemptEnded(outcome="finished", **ended)


def test_a_missed_gate_is_said_with_its_amount_and_the_scores_and_the_run_is_not_green(judged):
    state = final_state(judged("not promoted", (MISSED,)))
    assert (state.type.value, state.name) == ("CANCELLED", "NotPromoted")
    assert state.message.splitlines() == [
        f"adder: not promoted; {MISSED}; compared with champion (version 1)",
        "scores: sums.exact_match 0.6",
        "2 stages in 30.0 s",
    ]


def test_a_refusal_that_is_found_cached_is_not_green_either_and_nobody_is_notified_again(judged, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"tags": {"verdict": "not promoted"}}))
    record = judged("not promoted", (MISSED,))
    cached = StageCached(stage="promote", artifact=tmp_path, attempt=None, seconds=0.0)
    state = final_state(after(record, cached))
    assert (state.type.value, state.name) == ("CANCELLED", "StillNotPromoted")
    assert state.name not in STATES["not-promoted"]
    assert state.message == final_state(record).message


def test_a_promotion_is_said_with_its_scores(judged):
    state = final_state(judged("promoted"))
    assert (state.type.value, state.name) == ("COMPLETED", "Promoted")
    assert state.message.startswith("adder: promoted; compared with champion (version 1)\nscores: sums.exact_match 0.6")


def test_a_failure_is_said_with_its_stage_and_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    failed = StageFailed(stage="rows", seconds=1.0, error="the hub is gone", error_class="DownloadError")
    ended = RefreshEnded(state="failed", seconds=2.0, error="failed: rows")
    state = final_state(fold([*began(tmp_path, "rows"), failed, ended]))
    assert state.type.value == "FAILED"
    assert state.message.splitlines()[:2] == ["failed: rows", "rows: DownloadError: the hub is gone"]


def test_a_stage_that_was_stopped_has_not_failed_in_prefect_either():
    class Stopped:
        def build(self, name, attempt, log):
            raise RefreshStoppedError(f"{name} was stopped, because the refresh was stopped")

    with disable_run_logger():
        state = build_stage.fn("sft", Stopped())
    assert (state.type.value, state.message) == ("CANCELLED", "sft was stopped, because the refresh was stopped")
