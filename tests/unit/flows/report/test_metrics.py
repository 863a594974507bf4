"""Metrics of a home are folded from its ledgers once, whatever is torn, removed or added, and only with the key."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from flows.ledger.events import AttemptBegan, CompareBegan, LayoutEntry, RefreshKilled, StageWaits, TrialEnded
from flows.ledger.home import home
from flows.ledger.refreshes import end_of, ledger_of
from flows.ledger.totals import FORGOTTEN_AFTER_MS, Totals, catch_up, read_totals
from flows.service.worker import add_metrics
from flows.tracking.exposition import metrics_text
from tests.unit.flows.report.conftest import METRICS, START_MS

OF_SFT = {"recipe": "nightly", "stage": "sft", "kind": "train"}


def samples():
    """Return all samples of the home's metrics, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics_text())
        for sample in family.samples
    }


def value(found, name, **labels):
    return found.get((f"lifecycle_{name}", *sorted(labels.items())))


def test_a_night_and_a_failed_one_are_counted_with_their_price(night):
    (home() / "hardware.yaml").write_text("like: h200\nprice_per_device_hour: 3.6\n")
    night.refresh()
    night.refresh(failing="sft")
    found = samples()
    assert value(found, "refreshes_total", recipe="nightly", kind="refresh", state="completed") == 1
    assert value(found, "last_refresh_state", recipe="nightly", state="failed") == 1
    assert value(found, "attempts_total", **OF_SFT, outcome="finished") == 1
    assert value(found, "attempts_total", **OF_SFT, outcome="failed") == 1
    # Ten seconds each, of two devices and of one.
    assert value(found, "stage_seconds_total", **OF_SFT) == 20
    assert value(found, "device_seconds_total", **OF_SFT) == 30
    assert value(found, "device_price_total", **OF_SFT) == pytest.approx(0.03)
    assert value(found, "stage_tokens_per_second", **OF_SFT) == METRICS["sft"]["tokens_per_s"]
    scores = {"recipe": "nightly", "stage": "scores", "kind": "evaluate", "score": "sums.exact_match"}
    assert value(found, "score", **scores) == 0.9375
    gate = {"recipe": "nightly", "stage": "promote", "kind": "promote", "gate": "sums.exact_match"}
    assert value(found, "gate_margin", **gate) == pytest.approx(0.0375)
    assert value(found, "last_success_age_seconds", recipe="nightly") < 600
    assert value(found, "home_free_bytes") > 0


def test_a_damaged_hardware_file_is_one_of_the_metrics_and_hides_no_other(night):
    (home() / "hardware.yaml").write_text("like: [")
    night.refresh()
    found = samples()
    assert value(found, "damaged_hardware_file") == 1
    assert value(found, "device_seconds_total", **OF_SFT) == 20
    assert value(found, "device_price_total", **OF_SFT) is None
    (home() / "hardware.yaml").write_text("like: h200\nprice_per_device_hour: 3.6\n")
    night.refresh()
    found = samples()
    assert value(found, "damaged_hardware_file") == 0
    assert value(found, "device_price_total", **OF_SFT) == pytest.approx(0.02)


def test_totals_of_a_ledger_that_grows_are_those_of_the_whole_one(night):
    """Fold a ledger after each of its events, with a line that is half written and one that a crash tore."""
    record = night.refresh()
    ledger = ledger_of(record.refresh)
    ledger.append(RefreshKilled(process=record.process))  # of a refresh that has ended
    lines = ledger.file.read_bytes().splitlines(keepends=True)
    lines.insert(3, lines[3][:20] + b"\n")
    whole, growing = Totals(), Totals()
    for number, line in enumerate(lines):
        for text in (line[:-7], line):
            ledger.file.write_bytes(b"".join(lines[:number]) + text)
            catch_up(growing, 1.0, START_MS)
    catch_up(whole, 1.0, START_MS)
    assert growing == whole
    assert whole.recipes["nightly"].refreshes == {"completed": 1}
    assert whole.recipes["nightly"].stages["sft"].cost == 20


def test_what_was_read_is_not_read_again_and_stays_when_its_ledger_is_removed(night):
    ledger = ledger_of(night.refresh().refresh)
    before = read_totals()
    text = ledger.file.read_bytes()
    ledger.file.write_bytes(b"x" * len(text))
    assert read_totals() == before
    ledger.file.unlink()
    assert read_totals().recipes == before.recipes
    totals = Totals(recipes=before.recipes)
    catch_up(totals, 0.0, before.recipes["nightly"].at_ms + FORGOTTEN_AFTER_MS + 1)
    assert totals.recipes == {}


def test_an_event_of_a_later_version_is_told_and_read_on_from_once_it_is_known(night):
    ledger = ledger_of(night.refresh().refresh)
    text = ledger.file.read_bytes()
    ledger.file.write_bytes(text.replace(b'"attempt_ended"', b'"attempt_paused"', 1))
    assert value(samples(), "damaged_ledgers") == 1
    ledger.file.write_bytes(text)
    found = samples()
    assert value(found, "damaged_ledgers") == 0
    assert value(found, "attempts_total", **OF_SFT, outcome="finished") == 1


def test_a_running_refresh_waits_and_a_comparison_costs_its_trials(night):
    record = night.refresh(failing="sft")
    ledger = ledger_of(record.refresh)
    began = next(ledger.events())
    ledger.append(began.model_copy(update={"time_ms": began.time_ms + 1}))  # a retry
    ledger.append(StageWaits(time_ms=START_MS, stage="sft", reason="for devices"))
    found = samples()
    assert value(found, "running_refreshes", recipe="nightly") == 1
    assert value(found, "waiting_stages", recipe="nightly") == 1
    assert value(found, "longest_wait_seconds", recipe="nightly") > 0
    fields = {"stage": "sft", "number": 2, "work": Path("w"), "first_byte": 0, "params": {}, "tags": {}}
    ledger.append(AttemptBegan(time_ms=START_MS + 4000, **fields))
    for _ in range(2):  # two processes may close the ledger of a dead one
        ledger.append(end_of(ledger.read().attempts["sft-2"], "killed"))
    layout = LayoutEntry(text="dp", engine="fsdp", num_devices=8, global_batch_size=8, params={}, tags={})
    ledger.append(CompareBegan(stage="sft", num_steps=1, num_warmup_steps=0, num_rounds=1, layouts=(layout,)))
    ledger.append(TrialEnded(layout=0, round=1, work=Path("w"), seconds=5.0))
    ledger.append(RefreshKilled(process=record.process))
    found = samples()
    assert value(found, "stage_wait_seconds_total", **OF_SFT) == 4
    assert value(found, "attempts_total", **OF_SFT, outcome="killed") == 1
    assert value(found, "refreshes_total", recipe="nightly", kind="comparison", state="killed") == 1
    assert value(found, "last_refresh_state", recipe="nightly", state="failed") == 1
    assert value(found, "device_seconds_total", **OF_SFT) == 10 + 40


async def ask(application, credentials):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://worker") as client:
        return await client.get("/metrics", auth=credentials)


def test_the_worker_gives_the_metrics_to_those_who_have_the_key_alone(night):
    night.refresh()
    for password, given, status in (
        ("secret", ("lifecycle", "secret"), 200),
        ("secret", ("lifecycle", "secre"), 401),
        ("secret", None, 401),
        (None, ("lifecycle", "None"), 401),
    ):
        application = FastAPI()
        add_metrics(application, password)
        answer = asyncio.run(ask(application, given))
        assert (answer.status_code, "lifecycle_refreshes_total{" in answer.text) == (status, status == 200)
    assert json.loads((home() / "metrics.json").read_bytes())["recipes"]["nightly"]["refreshes"] == {"completed": 1}
