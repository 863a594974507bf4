"""Fixtures for tests of reports: invented records and artifacts of finished pipeline runs; no stage runs."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from flows.ledger.events import (
    AttemptBegan,
    AttemptEnded,
    CompareBegan,
    LayoutEntry,
    LayoutMeasured,
    PlannedEntry,
    RefreshBegan,
    RefreshEnded,
    StageCached,
    TrialEnded,
)
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import ledger_of
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.report.layouts import Row
from stages.data.summaries import LENGTHS_FILE, Lengths
from stages.kinds.promote.paired import Difference
from stages.kinds.promote.verdict import Gate, Verdict
from tests.unit.flows.conftest import commit_stage

STAGES = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "rows": {"kind": "download", "dataset": "builtin/addition"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "rows"},
        "global_batch_size": 8,
        "learning_rate": 1e-3,
    },
    "serve": {"kind": "serve", "model": "sft"},
    "scores-base": {"kind": "evaluate", "model": "base", "tasks": ["sums"], "task_folder": "."},
    "scores": {"kind": "evaluate", "model": "serve", "tasks": ["sums"], "task_folder": "."},
    "promote": {"kind": "promote", "name": "adder", "model": "sft", "evaluations": ["scores"], "server": "serve"},
}
METRICS = {
    "rows": {"bytes": 990753.0, "num_files": 2.0},
    "sft": {
        "loss": 0.5,
        "tokens_per_s": 19552.5,
        "real_tokens_per_s": 9776.25,
        "mfu": 0.2525,
        "step_time_s": 0.2094,
        "predicted_step_time_s": 0.2372,
        "peak_memory_gib": 0.6056,
        "predicted_memory_gib": 0.5565,
        "num_documents": 9200.0,
        "share_asked.old": 0.25,
        "share_seen.old": 0.26,
        "share_asked.new": 0.75,
    },
    "serve": {"time_to_ready_s": 12.5, "ttft_ms_concurrency_8": 31.5, "output_tokens_per_s_concurrency_8": 812.0},
    "scores-base": {"sums.exact_match": 0.0, "sums.exact_match_stderr": 0.0},
    "scores": {"sums.exact_match": 0.9375, "sums.exact_match_stderr": 0.0125},
    "promote": {
        "gates_missed": 0.0,
        "sums.exact_match_difference": 0.05,
        "sums.exact_match_difference_stderr": 0.0125,
    },
}
LENGTHS = Lengths(bin_tokens=16, counts={"old": (3, 0, 2), "new": (0, 4, 1)})
LOSSES = [3.0, 2.0, float("nan"), 0.5]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
START_MS = 1_795_000_000_000
TOKENS_PER_STEP = 100.0
GATE = Gate("sums.exact_match", 0.9375, 0.9, least=True)
PAIRED = Difference("sums.exact_match", 500, 0, 0.9375, 0.8875, 0.05, 0.0125, higher_is_better=True)
VERDICT = Verdict(
    outcome="promoted",
    name="adder",
    champion_version="1",
    against="champion (version 1)",
    missed=(),
    gates=(GATE,),
    differences=(PAIRED,),
)


class Night:
    """Maker of invented pipeline runs (refreshes) of one recipe, a day apart, each with another learning rate."""

    def __init__(self, store, folder):
        self.store, self.folder, self.number = store, folder, 0

    def refresh(self, failing=None, error=HOSTILE, devices=2, rate=None, energy_j=None, revision=None):
        """Write an invented refresh's ledger and artifacts; return its record. failing: stage with this `error`."""
        self.number += 1
        tree = {**STAGES, "sft": {**STAGES["sft"], "learning_rate": rate or self.number * 1e-3}}
        recipe = load_stages("nightly", self.folder, tree)
        outside = {name: {"task_folder": "0" * 64} if "scores" in name else {} for name in recipe.stages}
        outside["rows"] = {"revision": revision} if revision else {}
        made = plan(recipe, outside, self.store.index())
        ledger = ledger_of(f"nightly-{self.number}")
        began_ms = START_MS + self.number * 86_400_000
        ledger.append(
            RefreshBegan(
                time_ms=began_ms,
                refresh=f"nightly-{self.number}",
                recipe="nightly",
                recipe_path=self.folder / "nightly.yaml",
                process=ProcessIdentity.own(),
                hardware="2 × abacus",
                git_commit="c" * 40,
                stages={
                    name: PlannedEntry(kind=one.kind, version=one.version, reason=one.reason, upstream=one.upstream)
                    for name, one in made.stages.items()
                },
            )
        )
        built = {}
        for number, (name, stage) in enumerate(made.stages.items()):
            if known := self.store.find(stage.kind, stage.version):
                built[name] = known
                attempt = known.record.attempt
                ledger.append(StageCached(stage=name, artifact=known.folder, attempt=attempt, seconds=0.01))
                continue
            times = (began_ms + 10_000 * number, began_ms + 10_000 * (number + 1))
            if name == failing:
                self._fail(ledger, name, times, error)
                break
            references = {field: built[one] for field, one in stage.config.references().items()}
            built[name] = self._build(ledger, stage, references, times, devices, energy_j)
        state = "failed" if failing else "completed"
        ledger.append(RefreshEnded(state=state, seconds=70.0, error=f"failed: {failing}" if failing else None))
        return ledger.read()

    def _build(self, ledger, stage, references, times, devices, energy_j):
        artifact = commit_stage(self.store, stage, references, f"{stage.name} {self.number}")
        record = artifact.record
        changes = {
            "attempt": f"{ledger.folder.name}/{stage.name}-1",
            "finished": record.finished + timedelta(days=self.number),
        }
        (artifact.folder / "record.json").write_text(record.model_copy(update=changes).model_dump_json())
        tags = {"verdict": "promoted", "registered_model": "adder"} if stage.kind == "promote" else {}
        said = {"metrics": METRICS.get(stage.name, {}), "tags": tags}
        (artifact.folder / "result.json").write_text(json.dumps(said))
        if stage.kind == "train":
            rows = [{"step": n, "time_ms": n, "loss": loss / self.number} for n, loss in enumerate(LOSSES, 1)]
            (artifact.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (artifact.folder / LENGTHS_FILE).write_text(LENGTHS.model_dump_json())
        if stage.kind == "promote":
            (artifact.folder / "verdict.json").write_text(VERDICT.model_dump_json())
        begin = self._begin(ledger, stage.name, artifact.folder, times[0], devices)
        end = {
            "stage": begin.stage,
            "number": 1,
            "folder": artifact.folder,
            "last_byte": 0,
            "seconds": 9.5,
            "energy_j": energy_j,
            **said,
        }
        ledger.append(AttemptEnded(time_ms=times[1], outcome="finished", **end))
        return self.store.find(record.kind, record.version)

    def _fail(self, ledger, name, times, error):
        work = self.folder / f"work-{self.number}"
        work.mkdir()
        (work / "log.txt").write_text(f"it began\n{HOSTILE}\nit ended\n")
        begin = self._begin(ledger, name, work, times[0], 1)
        end = {"stage": begin.stage, "number": 1, "folder": work, "last_byte": 0, "seconds": 9.5}
        ledger.append(AttemptEnded(time_ms=times[1], outcome="failed", error=error, error_class="DataError", **end))

    def _begin(self, ledger, name, work, time_ms, devices):
        begin = AttemptBegan(
            time_ms=time_ms, stage=name, number=1, work=work, first_byte=0, num_devices=devices, params={}, tags={}
        )
        ledger.append(begin)
        return begin


@pytest.fixture
def night(store, tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return Night(store, tmp_path)


LAYOUTS = {
    "fsdp micro_batch_size=4": {"tokens_per_s": 100.0, "step_time_s": 1.0, "step_time_iqr_s": 0.25},
    "megatron tp=2 micro_batch_size=4 sequence_parallel=True recompute=selective": {
        **{"tokens_per_s": 150.0, "step_time_s": 0.6, "predicted_step_time_s": 0.5, "peak_memory_gib": 2.0},
        **{"peak_memory_gib_rank_0": 2.0, "peak_memory_gib_rank_1": 1.5, "predicted_memory_gib": 1.75},
    },
    HOSTILE: {},
}
"""Parallel layouts of a fake comparison with their measured metrics; the last layout could not run."""


@pytest.fixture
def comparison(night, tmp_path):
    """Provide the record of a comparison of parallel layouts, in which each layout that ran was tried for an hour."""
    layouts = tuple(
        LayoutEntry(text=text, engine="fsdp", num_devices=n, global_batch_size=8, params={}, tags={})
        for n, text in enumerate(LAYOUTS, 1)
    )
    measured = {
        n: LayoutMeasured(layout=n, metrics=metrics, error=None if metrics else f"no memory {HOSTILE}")
        for n, metrics in enumerate(LAYOUTS.values())
    }
    began = CompareBegan(stage="sft", num_steps=3, num_warmup_steps=1, num_rounds=2, layouts=layouts)
    trials = tuple(TrialEnded(layout=n, round=1, work=tmp_path, seconds=3600.0) for n in range(2))
    return replace(night.refresh(), comparison=began, measured=measured, trials=trials)


@pytest.fixture
def make_row():
    def make(tokens_per_s, num_devices=1, global_batch_size=8, text=None, error=None, **metrics):
        metrics = {} if error else {"tokens_per_s": tokens_per_s, "step_time_s": 100 / tokens_per_s, **metrics}
        name = text or f"fsdp dp_shard={num_devices} {tokens_per_s:g}"
        return Row(name, "fsdp", num_devices, global_batch_size, {}, metrics, error)

    return make


@pytest.fixture
def make_trial(tmp_path):
    """Provide a function: step times → a trial's record and metrics, with a loss of 1 / n at step n."""

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
