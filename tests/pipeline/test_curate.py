"""A curate stage drops exactly the leaked and duplicate rows planted in a dataset, and training uses the rest.

By night, the evaluation warns which of two models may have seen its test questions.
"""

import json

import pytest
from refreshes import ROOT, ForkedHome, states

from stages.hubs.builtin import addition_crawled as crawled

RECIPE = ROOT / "configs" / "quickstart-curate.yaml"
OVERRIDES = [
    *(f"stages.{stage}.{field}" for stage in ("sft-raw", "sft-clean") for field in ("steps=2", "warmup_steps=0")),
    *(f"stages.{stage}.limit=20" for stage in ("evaluate-raw", "evaluate-clean")),
]
RUN = ["run", str(RECIPE), *(part for one in OVERRIDES for part in ("--set", one)), "--json"]


TO_TRAINING = [*RUN, "--until", "sft-clean"]


def run(home, command):
    """Run a refresh by a `lifecycle` command, and return the JSON record that it printed."""
    done = home.lifecycle(*command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def refreshed(lent_home):
    """Provide the lifecycle home of a refresh that trained on curated rows, and the refresh's JSON output."""
    home = ForkedHome(lent_home)
    return home, run(home, TO_TRAINING)


def artifact(home, record, stage):
    return home.folder / "store" / record["stages"][stage]["kind"] / f"{stage}-{record['stages'][stage]['version']}"


def warnings(home, record, stage):
    events = (artifact(home, record, stage) / "events.jsonl").read_text().splitlines()
    return [event["message"] for event in map(json.loads, events) if event["event"] == "warning"]


def test_what_was_planted_is_left_out_and_nothing_else(refreshed):
    home, record = refreshed
    assert set(states(record).values()) == {"built"}
    report = json.loads((artifact(home, record, "clean") / "report.json").read_text())
    assert {step["step"]: step["dropped"] for step in report["steps"]} == {
        "bad_rows": 0,
        "decontaminate": crawled.NUM_LEAKED,
        "redact": 0,
        "exact_duplicates": crawled.NUM_COPIES,
        "near_duplicates": crawled.NUM_REWRITTEN,
    }
    assert report["redacted"] == {"email": crawled.NUM_WITH_ADDRESS}
    assert report["steps"][-1]["kept"] == crawled.NUM_GOOD


@pytest.mark.nightly
def test_only_the_evaluation_of_a_model_that_learned_from_raw_rows_warns(refreshed):
    """An evaluation warns only of the model that learned from uncurated rows.

    `make test` covers this by `unit/flows/planning/test_contamination.py`.
    """
    home, _ = refreshed
    record = run(home, RUN)
    (warning,) = [said for said in warnings(home, record, "evaluate-raw") if "decontaminated" in said]
    assert warning.startswith("crawled, from which sft-raw learned, was not decontaminated against addition")
    assert not [said for said in warnings(home, record, "evaluate-clean") if "decontaminated" in said]


def test_curated_again_it_is_found_in_the_store(refreshed):
    home, _ = refreshed
    assert set(states(run(home, TO_TRAINING)).values()) == {"cached"}
