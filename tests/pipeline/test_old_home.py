"""A lifecycle home made by an earlier version can be read, reported, retried and rolled back, also after a move.

`old_home.tar.xz` was made below /srv/lifecycle by the version of November 2026: two nights in which a model of 50,000
parameters was taught sums and learned from its own answers (GRPO), each with a new champion, and a training that was
killed after its checkpoint of step 40. It is never made again: what its files say must stay readable.
"""

import json
import re
import shutil
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from refreshes import ForkedHome, states

OLD_HOME = Path(__file__).with_name("old_home.tar.xz")
MADE_AT = "/srv/lifecycle"
OTHER_PROGRAMS = re.compile(r"content of \w+_version|version of .*")
"""Pattern of reasons to rebuild a stage that name only changed program versions, its own or upstream ones."""
TOKENIZED_WITH = {"tokenizers": "0.23.3", "transformers": "5.17.0", "numpy": "2.4.6"}
"""Library versions on which the cache keys of the old lifecycle home's tokenized datasets depend."""


def unpack(folder: Path) -> Path:
    """Unpack the old home with its recipes, adapt their paths in its ledgers, and return its folder."""
    with tarfile.open(OLD_HOME) as tar:
        tar.extractall(folder, filter="data")
    for ledger in folder.glob("home/ledger/*/ledger.jsonl"):
        ledger.write_text(ledger.read_text().replace(f"{MADE_AT}/recipes", f"{folder}/recipes"))
    return folder / "home"


@pytest.fixture(scope="module")
def old_home(tmp_path_factory):
    """Provide a lifecycle home of an earlier version, whose servers are down but whose MLflow database can be read."""
    home = ForkedHome(unpack(tmp_path_factory.mktemp("old")))
    home.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{home.folder}/mlflow/mlflow.db"
    return home


def answer(home, *arguments):
    done = home.lifecycle(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def row_of_step(step, metrics):
    return next(row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"] == step)


def first_refresh(home, recipe):
    """Return the name of the oldest refresh of a recipe in the old lifecycle home."""
    return min(path.name for path in home.folder.glob(f"ledger/{recipe}-*"))


def test_every_artifact_is_found_and_whole(old_home):
    assert answer(old_home, "verify") == {"verified": 8, "damaged": []}


def test_what_was_built_is_cached_unless_a_program_has_another_version(old_home):
    recipe = old_home.folder.parent / "recipes" / "night.yaml"
    planned = {stage["name"]: stage for stage in answer(old_home, "plan", str(recipe))["stages"]}
    assert {name for name, stage in planned.items() if stage["action"] == "cached"} >= {"base", "sums", "sft"}
    for stage in planned.values():
        fields = [difference["field"] for difference in stage["differences"]]
        assert stage["action"] == "cached" or fields, f"{stage['name']} has another version, but the same identity"
        assert [field for field in fields if not OTHER_PROGRAMS.fullmatch(field)] == []


def test_the_report_of_a_night_has_its_curves_rollouts_scores_and_verdict(old_home):
    name = first_refresh(old_home, "night")
    shown = answer(old_home, "show", name)
    assert {stage: entry["state"] for stage, entry in shown["stages"].items()} == {
        **dict.fromkeys(("base", "sums"), "cached"),
        **dict.fromkeys(("sft", "grpo", "evaluate", "promote"), "built"),
    }
    assert shown["stages"]["promote"]["verdict"] == "promoted"
    page = Path(answer(old_home, "report", name)["report"]).read_text()
    for text in ("reward", "evaluation_loss", "addition.exact_match", "promoted", "What is "):
        assert text in page


def test_a_rollback_makes_the_first_champion_champion_again(old_home):
    assert answer(old_home, "champion", "adder")["version"] == "2"
    restored = answer(old_home, "rollback", "adder")
    assert (restored["version"], restored["previous"]) == ("1", "2")
    assert Path(restored["folder"]).is_relative_to(old_home.folder)


def test_a_killed_training_goes_on_from_its_checkpoint_when_it_is_retried(lent_home, tmp_path):
    unpacked = unpack(tmp_path)
    for name in ("store", "ledger"):
        shutil.copytree(unpacked / name, lent_home / name)
    home = ForkedHome(lent_home)
    tokenized = {path.name for path in home.folder.glob("store/.cache/train/tokenized/*")}
    (work,) = unpacked.glob("store/.work/train/sft-*")
    refresh = first_refresh(home, "killed")

    done = answer(home, "retry", refresh)

    assert done["refresh"] == refresh
    assert states(done) == {"base": "cached", "sums": "cached", "sft": "built"}
    artifact = Path(done["stages"]["sft"]["artifact"])
    assert "continuing from the checkpoint of step 40" in (artifact / "events.jsonl").read_text()
    killed, retried = (row_of_step(41, folder / "metrics.jsonl") for folder in (work, artifact))
    for name in ("loss", "grad_norm"):
        assert retried[name] == pytest.approx(killed[name], rel=1e-3), "the weights of step 40, and the rows of 41"
    if {name: version(name) for name in TOKENIZED_WITH} == TOKENIZED_WITH:
        assert {path.name for path in home.folder.glob("store/.cache/train/tokenized/*")} == tokenized
