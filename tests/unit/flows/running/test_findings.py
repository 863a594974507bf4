"""A stage may reject its own result: the result is stored, nothing is built on it, and later runs repeat the error."""

import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from flows.cli.main import cli
from flows.cli.show import artifact_as_text, refresh_as_text
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running.adopt import adopt
from flows.running.refresh_run import RefreshRun
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.running.runner import run_stage
from flows.store.store import Store
from stages.core.contract import FINDING_TAG, StageResult, finding_of
from stages.core.errors import DataError, GateError, LifecycleError, ModelError
from tests.faults.tiny import Notes

LOG = logging.getLogger("refresh")
NOTHING_HELD_OUT = "`held_out`: a fraction of 0.001 of 1 groups"


@pytest.fixture
def run_of(tmp_path, monkeypatch, request):
    """Provide a function that makes a pipeline run whose curate stage rejects its result for lack of held-out rows."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "short"}) + "\n" for _ in range(3)))
    tree = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "rows": {"kind": "download", "dataset": f"file://{tmp_path}/rows.jsonl"},
        "clean": {"kind": "curate", "datasets": ["rows"], "held_out": {"fraction": 0.001}},
        "sft": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "clean"},
            "global_batch_size": 1,
            "learning_rate": 1e-3,
            "steps": 1,
        },
    }
    recipe = load_stages("small", request.config.rootpath, tree)
    store = Store(tmp_path / "home" / "store")

    def make(force=()):
        planned = plan(recipe, {name: {} for name in recipe.stages}, store.index(), force=force)
        return RefreshRun(PlannedRefresh(RefreshRequest("small.yaml"), planned, store))

    return make


def test_what_a_stage_refuses_is_kept_and_refused_again_without_being_made_again(run_of):
    run = run_of()
    run.build("rows", 1, LOG)
    with pytest.raises(DataError, match=NOTHING_HELD_OUT) as refused:
        run.build("clean", 1, LOG)
    (artifact,) = (run.store.root / "curate").iterdir()
    assert artifact.name in str(refused.value)
    assert "`--force clean`" in str(refused.value)
    kept = run.store.find("curate", run.plan.stages["clean"].version)
    assert kept.record.tags[FINDING_TAG].startswith(f"DataError: {NOTHING_HELD_OUT}")
    assert "clean" not in run.built
    entry = run.finish().stages["clean"]
    assert (entry.state, entry.error_class, entry.artifact) == ("failed", "DataError", artifact)
    assert run.record.attempts["clean-1"].outcome == "finished", "its metrics and its log are those of an attempt"
    assert (run.record.state, run.record.error) == ("failed", "failed: clean")
    assert NOTHING_HELD_OUT in refresh_as_text(run.record)

    assert f"REFUSED: {NOTHING_HELD_OUT}" in artifact_as_text(kept, run.store.index())

    again = run_of()
    planned = again.plan.stages["clean"]
    assert planned.action == "cached"
    assert NOTHING_HELD_OUT in planned.reason
    again.build("rows", 1, LOG)
    with pytest.raises(DataError, match=NOTHING_HELD_OUT):
        again.build("clean", 1, LOG)
    assert again.finish().stages["clean"].state == "failed"
    assert not again.record.attempts
    assert kept.record == again.store.find("curate", planned.version).record

    forced = run_of(force=("clean",))
    forced.build("rows", 1, LOG)
    with pytest.raises(DataError, match=NOTHING_HELD_OUT):
        forced.build("clean", 1, LOG)
    forced.finish()
    assert list(forced.record.attempts) == ["clean-1"]


def test_nothing_is_built_on_an_artifact_that_its_stage_refuses(run_of, tmp_path):
    run = run_of()
    planned, notes = run.plan.stages, Notes()
    good = {name: run.build(name, 1, LOG) for name in ("rows", "base")}
    record = good["base"].record
    refused = record.model_copy(update={"tags": {**record.tags, FINDING_TAG: "GateError: it differs by 3 nats"}})
    upstream = {**good, "base": replace(good["base"], record=refused)}
    with pytest.raises(GateError, match="it differs by 3 nats"):
        run_stage(planned["sft"], {**upstream, "clean": good["rows"]}, run.store, notes)
    (tmp_path / "tuned").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "tuned" / name).write_text("{}")
    artifact = run.store.find(record.kind, record.version)
    with pytest.raises(GateError, match="it differs by 3 nats"):
        adopt(run.store, tmp_path / "tuned", "adapter", "tuned", notes, replace(artifact, record=refused))
    assert not notes.said
    run.finish()
    commit = json.dumps({**json.loads((artifact.folder / "record.json").read_text()), "tags": refused.tags})
    (artifact.folder / "record.json").write_text(commit)
    served = CliRunner().invoke(cli, ["serve", "base"])
    assert isinstance(served.exception, GateError)
    assert "it differs by 3 nats" in str(served.exception)


def test_several_findings_are_one_and_an_unknown_class_is_still_a_finding():
    good = StageResult(tags={"method": "awq"})
    assert good.refused_for([]) is good
    assert finding_of(good.tags) is None
    result = good.refused_for(
        [ModelError("2 layers are missing: a, b"), GateError("it differs"), ModelError("2 layers are missing: a, b")]
    )
    assert result.tags["method"] == "awq"
    finding = finding_of(StageResult.model_validate_json(result.model_dump_json()).tags)
    assert type(finding) is ModelError
    assert str(finding) == "2 layers are missing: a, b\nit differs"
    later = finding_of({FINDING_TAG: "LaterError: what a later version says"})
    assert type(later) is LifecycleError
    assert str(later) == "what a later version says"
