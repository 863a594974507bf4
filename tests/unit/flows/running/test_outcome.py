"""The outcome of a pipeline run (refresh) is worded for the terminal, Prefect and notifications."""

import json

import pytest

from flows.cli.run_command import closing_lines
from flows.cli.show import refresh_as_json, refresh_as_text
from flows.ledger.events import AttemptBegan, FlowRunKnown, RefreshEnded
from flows.ledger.refreshes import end_of, ledger_of
from flows.report.sentences import warnings_of
from flows.running.outcome import summary_lines
from flows.running.refresh import final_state
from flows.running.refresh_run import RefreshRun
from flows.running.request import RefreshRequest, make_plan
from flows.tracking.cursor import Shipped, write_shipped
from stages.core.intervals import zero_score_warning
from tests.beginnings import beginning

RISEN = "the held-out loss has risen again"
VERDICT = {"outcome": "not promoted", "name": "adder", "champion_version": "1", "against": "champion (version 1)"}
GATE = "sums.exact_match 0.6 < 0.9, missed by 0.3"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4321/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5432")
    return tmp_path


def ended(home, state, **fields):
    """Write the event log of a refresh that trained, evaluated and refused to promote; return its record."""
    ledger = ledger_of("nightly-1")
    kinds = {"sft": "train", "scores": "evaluate", "promote": "promote"}
    ledger.append(beginning(home, kinds))
    ledger.append(FlowRunKnown(prefect_flow_run_id="flow-run-of-prefect", prefect_run_count=1))
    for stage, kind in kinds.items():
        artifact = home / stage
        artifact.mkdir()
        events = [("milestone", "trained"), ("warning", RISEN), ("warning", RISEN)] if stage == "sft" else []
        lines = (json.dumps({"time_ms": 1, "event": event, "message": message}) for event, message in events)
        (artifact / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
        tags = {"recipe": "nightly", "kind": kind, "version": "0123456789ab"}
        ledger.append(AttemptBegan(stage=stage, number=1, work=artifact, first_byte=0, params={}, tags=tags))
        said = {"verdict": "not promoted"} if stage == "promote" else {}
        metrics = {"sums.exact_match": 0.6, "sums.exact_match_stderr": 0.05} if stage == "scores" else {}
        begun = ledger.read().attempts[f"{stage}-1"]
        ledger.append(end_of(begun, "finished", metrics=metrics, tags={**tags, **said}))
    (home / "promote" / "verdict.json").write_text(json.dumps({**VERDICT, "missed": [GATE]}))
    (home / "promote" / "verdict.md").write_text("# adder: not promoted\n")
    write_shipped(ledger, Shipped(experiment_id="7", parent_run_id="run-of-mlflow"))
    ledger.append(RefreshEnded(state=state, seconds=9.0, **fields))
    return ledger.read()


def test_everybody_is_told_of_scores_warnings_and_where_to_look(home):
    record = ended(home, "not_promoted")
    expected = [
        "scores: sums.exact_match 0.6",
        f"warning: sft: {RISEN}",
        "flow run: http://127.0.0.1:4321/runs/flow-run/flow-run-of-prefect",
        "MLflow: http://127.0.0.1:5432/#/experiments/7/runs/run-of-mlflow?workflowType=machine_learning",
        f"verdict of promote: {home / 'promote' / 'verdict.md'}",
    ]

    assert summary_lines(record) == expected
    assert "\n".join(expected) in closing_lines(record)
    assert "\n".join(expected) in refresh_as_text(record)
    state = final_state(record)
    assert state.name == "NotPromoted"
    assert {f"warning: sft: {RISEN}", "scores: sums.exact_match 0.6"} <= set(state.message.splitlines())
    assert GATE in state.message
    assert warnings_of(record) == [f"sft: {RISEN}"]


def test_what_several_stages_warn_of_is_said_once_with_their_names(home):
    record = ended(home, "completed")
    zero = zero_score_warning("sums.exact_match", "scores", 30, 22)
    for stage in ("scores", "promote"):
        (home / stage / "events.jsonl").write_text(json.dumps({"time_ms": 1, "event": "warning", "message": zero}))
    assert warnings_of(record) == [f"sft: {RISEN}", f"scores, promote: {zero}"]


def test_the_recipe_as_it_was_is_kept_without_secrets_and_shown(home):
    text = (
        "stages:\n  base:  # tiny\n    kind: download\n    model: builtin/qwen3-1m\n"
        "    execution: {environment: {UNNAMED: %s}}\n"
    )
    (home / "small.yaml").write_text(text % "planted")
    run = RefreshRun(make_plan(RefreshRequest(str(home / "small.yaml"))))
    (home / "small.yaml").write_text("changed since")
    assert refresh_as_json(run.ledger.read())["recipe_text"] == text % "'***'"
    assert not [file for file in run.ledger.folder.iterdir() if b"planted" in file.read_bytes()]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_refresh_that_stopped_is_said_to_go_on_with_retry(home, state):
    words = closing_lines(ended(home, state, error="stopped on request"))

    assert "lifecycle retry nightly-1" in words
    assert words.endswith("lifecycle show nightly-1")
