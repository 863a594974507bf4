"""Registered adapters survive crashes and rollbacks, and garbage collection never deletes their base model.

One store and one registry for all, in the order of the tests.
"""

import json

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from flows.champion import champions
from flows.champion.registry import CHAMPION, PREVIOUS, Registry
from flows.cli.main import cli
from flows.launch import local
from flows.ledger.home import store_root
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_stages
from flows.running.runner import BuiltStage, run_stage
from flows.store.collect import collect, find_garbage
from flows.store.store import Store
from stages.core.errors import RecipeError, StageCrashError
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict
from tests.faults import warm_promotion
from tests.faults.tiny import Notes
from tests.promotion import NAME, commit, offer_adapter, own_mlflow, promote_adapter

GOOD, BETTER = [1.0] * 90 + [0.0] * 10, [1.0] * 95 + [0.0] * 5
GATES = {"max_regression_standard_errors": None}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def registry(tmp_path_factory, warm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(local.PROGRAMS, "promote", warm_promotion.__name__)
        for name, value in {**own_mlflow(tmp_path_factory.mktemp("mlflow")), **warm}.items():
            patch.setenv(name, value)
        yield Registry()


@pytest.fixture(scope="module")
def store(registry) -> Store:
    return Store(store_root())


@pytest.fixture(scope="module")
def first(store) -> BuiltStage:
    return promote_adapter(store, "q_proj", GOOD, **GATES)


@pytest.fixture(scope="module")
def base(store, first) -> str:
    (folder,) = (store.root / "download").glob("base-*")
    return folder.name.removeprefix("base-")


def lifecycle(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_promoted_adapter_is_a_version_with_its_base(registry, first, base):
    version = champions.find(registry, NAME, CHAMPION)
    assert version.registration.model == f"train/{first.record.upstream['model'].version}"
    assert version.registration.base == f"download/{base}"
    in_mlflow = MlflowClient().get_model_version(NAME, "1")
    assert in_mlflow.tags["lifecycle.base"] == f"download/{base}"
    assert f"an adapter of `base-{base}`" in in_mlflow.description
    assert first.metrics["size_mib"] == 2**-10, "its own weights, not those of its base"


def test_commands_name_the_base(first, base):
    assert json.loads(lifecycle("champion", NAME, "--json"))["base"].endswith(f"/download/base-{base}")
    assert f"it is an adapter of download/{base} in " in lifecycle("champion", NAME)
    assert f"(train, an adapter of base {base})" in lifecycle("show", "tuned")
    assert json.loads(lifecycle("show", "tuned", "--json"))["base"]["version"] == base
    assert json.loads(lifecycle("show", "base", "--json"))["base"] is None


def test_what_takes_no_adapter_says_what_it_is_and_of_which_model(store, registry, first, base, tmp_path):
    spec = champions.launch_spec(champions.find(registry, NAME, CHAMPION))
    assert spec.folders.keys() == {f"{NAME}-base", NAME}
    assert (spec.served_name, spec.model.parent.name) == (NAME, f"base-{base}")
    recipe = load_stages("next", tmp_path, {"start": {"kind": "download", "model": f"models:/{NAME}@champion"}})
    with pytest.raises(RecipeError, match=rf"is an adapter, tuned-\w+, of base-{base}, not a model; promote what"):
        find_stored(recipe, recipe.stages, store.index())


def test_a_champion_can_be_gone_on_with_as_an_adapter(store, registry, first, base, tmp_path):
    tree = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "start": {"kind": "download", "adapter": f"models:/{NAME}@champion", "base": "base"},
    }
    recipe = load_stages("next", tmp_path, tree)
    found, notes = find_stored(recipe, ["start"], store.index())
    version = champions.find(registry, NAME, CHAMPION)
    folder = champions.artifact_of(version, version.registration.model).folder
    assert found.stages["start"].adapter == f"file://{folder}/adapter"
    assert notes[0].startswith(f"start: models:/{NAME}@champion is tuned-")


def test_a_promotion_that_was_killed_is_completed_and_can_be_rolled_back(store, registry, first, base, monkeypatch):
    planned, upstream = offer_adapter(store, "k_proj", BETTER, **GATES)
    with monkeypatch.context() as faulty:
        faulty.setenv("PROMOTION_FAULT", "set_registered_model_alias 1")
        with pytest.raises(StageCrashError):
            run_stage(planned, upstream, store, Notes())
    assert champions.find(registry, NAME, CHAMPION).number == "1"

    promote_adapter(store, "k_proj", BETTER, **GATES)
    champion, previous = (champions.find(registry, NAME, alias) for alias in (CHAMPION, PREVIOUS))
    assert (champion.number, previous.number) == ("2", "1")
    assert champion.registration.base == previous.registration.base == f"download/{base}"
    assert promote_adapter(store, "k_proj", BETTER, **GATES).state == "cached"
    assert f"version 1 is champion: {previous.registration.model}" in lifecycle("rollback", NAME)


def test_the_base_of_a_kept_adapter_is_not_collected(store, registry, first, base):
    planned, upstream = offer_adapter(store, "q_proj", GOOD, base="another", **GATES)
    verdict = Verdict(outcome="not promoted", name=NAME, champion_version="1", against=None, missed=())
    commit(store, planned, upstream, lambda work: (work / VERDICT_FILE).write_text(verdict.model_dump_json()) and None)

    folder = store.root / "download" / f"base-{base}"
    assert folder in {one.path for one in find_garbage(store)}, "but for its adapter, nothing keeps it"
    collect(store, find_garbage(store, champions.kept_versions()))
    adapter = champions.find(registry, NAME, CHAMPION)
    assert champions.artifact_of(adapter, adapter.registration.model).folder.exists()
    assert champions.base_of(adapter).folder == folder
