"""Errors say which server to start if MLflow, which knows the champions, is down; `gc` still keeps champions."""

import shutil
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from flows.champion import champions
from flows.champion.registrations import Registration, note, promotion_lock, registrations
from flows.champion.registry import RegisteredVersion
from flows.cli.show import serve_arguments
from flows.ledger.home import store_root
from flows.ledger.process_identity import ProcessIdentity
from flows.servers.records import ServerRecord, write_records
from flows.store.store import Store
from stages.core.errors import ServerError, StoreError
from stages.serving.config import ServingConfig, Speculation
from stages.serving.engine import LAUNCH_FILE
from stages.serving.registry import new_launch_spec
from tests.candidates import write_model
from tests.http_server import serving
from tests.promotion import NAME, commit, planned_stages

MODEL = {"kind": "download", "model": "builtin/qwen3-1m"}
TREE = {
    "model": {**MODEL, "files": ["large"]},
    "small": {**MODEL, "files": ["small"]},
    "served": {"kind": "serve", "model": "model", "speculative": {"draft": "small"}},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def registration(version, **more):
    return Registration(
        name="adder", model=f"quantize/{version}", digest=version, evaluations=(f"evaluate/of-{version}",), **more
    )


def test_where_nothing_was_registered_mlflow_is_not_asked(capsys):
    assert champions.kept_versions() == frozenset()
    assert capsys.readouterr().err == ""


def test_while_mlflow_is_away_everything_that_was_ever_registered_is_kept(capsys):
    note(registration("a"))
    note(registration("b", server="serve/of-b"))
    assert champions.kept_versions() == {"a", "of-a", "b", "of-b"}
    assert "keeping every model that was ever registered" in capsys.readouterr().err


def test_a_registration_that_is_noted_again_is_one():
    note(registration("a"))
    note(registration("a", server="serve/of-a"))
    assert [one.server for one in registrations()] == ["serve/of-a"]


def test_without_a_server_it_is_said_how_to_start_one():
    with pytest.raises(ServerError, match="lifecycle up"):
        champions.connect()


def test_a_server_without_a_key_is_not_said_to_be_down(tmp_path):
    """A running MLflow server without an access key, as earlier versions started it, is not reported as down."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with serving(Healthy) as address:
        port = int(address.rpartition(":")[2])
        write_records({"mlflow": ServerRecord(process=ProcessIdentity.own(), port=port, token="0" * 32)})
        with pytest.raises(ServerError, match=r"runs without a key: there is no .*servers\.key.*`lifecycle up`"):
            champions.connect()


def test_a_server_of_another_host_is_not_said_to_be_down():
    other = ProcessIdentity.own().model_copy(update={"boot": "another", "host": "other"})
    write_records({"mlflow": ServerRecord(process=other, port=1, token="0" * 32)})
    with pytest.raises(ServerError, match="runs on other: ask there"):
        champions.connect()


def test_a_registered_model_is_named_with_its_alias():
    assert champions.parse("models:/adder@champion") == ("adder", "champion")
    for wrong in ("models:/adder", "models:/adder/3", "adder@champion"):
        with pytest.raises(StoreError, match=r"expected models:/NAME@ALIAS"):
            champions.parse(wrong)


@pytest.mark.parametrize("name", ["../../x", "/x", "", "a/b", "a b", "x" * 129, "a\n"])
def test_a_name_that_is_no_model_s_has_no_lock(name):
    with pytest.raises(StoreError, match="is no name of a registered model"):
        promotion_lock(name)


def test_promotions_of_one_name_wait_for_one_another():
    entered = threading.Event()

    def promote():
        with promotion_lock("adder"):
            entered.set()

    with promotion_lock("adder"):
        with promotion_lock("another"):
            other = threading.Thread(target=promote)
            other.start()
        assert not entered.wait(0.2)
    other.join(300)
    assert entered.is_set()


def test_a_draft_model_that_left_the_store_is_named(capsys):
    """A champion is served without it, with a warning; the artifact of its serve stage is not."""
    store = Store(store_root())
    stages, built = planned_stages(store, TREE), {}
    for name in ("model", "small"):
        built[name] = commit(store, stages[name], {}, lambda work, name=name: write_model(work, name))
    draft = built["small"].artifact / "model"

    def write_launch(work):
        guessing = Speculation(method="draft", draft=draft)
        spec = new_launch_spec(built["model"].artifact / "model", "model", ServingConfig(), speculation=guessing)
        (work / LAUNCH_FILE).write_text(spec.model_dump_json())

    server = commit(store, stages["served"], built, write_launch)
    artifact = store.find(server.kind, server.version)
    model, digest = f"download/{built['model'].version}", built["model"].record.digest
    registration = Registration(name=NAME, model=model, digest=digest, evaluations=(), server=f"serve/{server.version}")
    version = RegisteredVersion(registration, "3", None)

    assert champions.launch_spec(version).speculation.draft == draft
    assert "--speculation" in serve_arguments(artifact, store.index())
    assert capsys.readouterr().out == ""

    shutil.rmtree(built["small"].artifact)
    assert champions.launch_spec(version).speculation is None
    warning = capsys.readouterr().out
    assert f"warning: version 3 of {NAME} is served without guessing tokens ahead" in warning
    assert f"its draft model {draft} is not in the store; run its refresh again" in warning
    with pytest.raises(StoreError, match=r"its draft model .* is not in the store; run its refresh again"):
        serve_arguments(artifact, store.index())
