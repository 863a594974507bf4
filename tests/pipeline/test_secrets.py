"""Secrets are planted, everything runs, and then everything that it left or showed is searched for them."""

import json
import re
import secrets
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from refreshes import after, model
from worker_home import STAND_IN, WorkerHome

from stages.hubs.builtin import qwen3
from tests.hub_server import running_hub
from tests.serving import SERVING

pytestmark = pytest.mark.timeout(900)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAMPLE_INTERVAL_S = 0.1
PLACES = ("HF_TOKEN", "VLLM_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MIRROR_PASSWORD", "OWN_SECRET")


@pytest.fixture(scope="module")
def planted():
    """Where a secret is put → what it is; letters only, so that no encoding changes them."""
    return {place: f"planted{place.replace('_', '').lower()}{secrets.token_hex(12)}" for place in PLACES}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, planted):
    """A hub whose only model needs the planted token."""
    folder = tmp_path_factory.mktemp("model")
    qwen3.make(folder)
    with running_hub() as server:
        repository = server.repository("org/tiny")
        repository.commit({path.name: path.read_bytes() for path in folder.iterdir()})
        repository.token = planted["HF_TOKEN"]
        yield server


def recipe(home, hub, planted):
    """Stages of every kind that sees a secret, and three that fail while they have one in their hands."""
    rows = home.folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": f"{a + 1}"}) + "\n" for a in range(64)))
    told = {"OWN_SECRET": planted["OWN_SECRET"], "PYTHONPATH": str(STAND_IN)}
    mirror = hub.url.replace("://", f"://me:{planted['MIRROR_PASSWORD']}@")
    stages = {
        "base": {"kind": "download", "model": "hf://org/tiny"},
        "rows": {"kind": "download", "dataset": f"file://{rows}"},
        "sft": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows", "sequence_length": 32},
            "steps": 2,
            "global_batch_size": 2,
            "learning_rate": 1e-3,
            "precision": "fp32",
            "export_dtype": "float32",
            "execution": {"environment": {"OWN_SECRET": planted["OWN_SECRET"]}},
        },
        "scores": {**after("sft"), "serving": SERVING, "limit": 4, "execution": {}},
        "mirrored": {
            "kind": "download",
            "model": f"hf://org/absent@{COMMIT}",
            "execution": {"environment": {"HF_ENDPOINT": mirror}},
        },
        "explained": model("quote_secret", "explained", **told),
        "dead": model("print_secret", "dead", **told),
    }
    path = home.folder.parent / "secrets.yaml"
    path.write_text(json.dumps({"name": "secrets", "stages": stages}))
    return path


@pytest.fixture(scope="module")
def seen(tmp_path_factory, hub, planted):
    """The home after a scheduled refresh, its record, what was shown of it, and the command lines of all processes."""
    home = WorkerHome(tmp_path_factory.mktemp("secrets") / "home")
    home.environment |= {name: planted[name] for name in PLACES[:3]}
    home.environment |= {"HF_ENDPOINT": hub.url, "MLFLOW_TRACKING_USERNAME": "me"}
    with command_lines() as commands:
        home.schedule(recipe(home, hub, planted))
        flow_run = home.run_now("secrets")
        shown = [home.lifecycle(*words) for words in (("runs", "--json"), ("show",), ("status",))]
    yield (
        home,
        home.record(flow_run),
        [home.logs(flow_run["id"]), *(done.stdout + done.stderr for done in shown)],
        commands,
    )
    assert home.lifecycle("down").returncode == 0


@contextmanager
def command_lines():
    """A set that fills with the command line of every process there is."""
    found, ended = set(), threading.Event()

    def sample():
        while not ended.wait(SAMPLE_INTERVAL_S):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    found.add(file.read_bytes())
                except OSError:
                    continue

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield found
    finally:
        ended.set()
        sampler.join()


def test_the_secrets_were_in_use(seen, hub):
    _, refresh, _, commands = seen
    expected = dict.fromkeys(("base", "rows", "sft", "scores"), "built")
    found = {name: entry.state for name, entry in refresh.stages.items()}
    assert found == expected | dict.fromkeys(("mirrored", "explained", "dead"), "failed"), refresh
    assert any(request.headers.get("Authorization", "").startswith("Bearer planted") for request in hub.requests)
    assert any(b"serve" in command and b"--served-model-name" in command for command in commands)


def test_failures_name_the_place_of_a_secret_but_not_the_secret(seen):
    errors = {name: entry.error for name, entry in seen[1].stages.items() if entry.error}
    assert "://me:***@127.0.0.1" in errors["mirrored"]
    assert errors["explained"] == "the server refused ***"
    assert "it was *** that it tried" in errors["dead"]


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_in_no_file_and_no_database(seen, planted, place):
    files = [path for path in seen[0].folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"prefect.db", "mlflow.db", "server.log", "record.json"} <= {path.name for path in files}
    assert [path for path in files if planted[place].encode() in path.read_bytes()] == []


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_neither_shown_nor_in_a_process_list(seen, planted, place):
    _, _, shown, commands = seen
    assert all(shown)
    assert [text for text in shown if planted[place] in text] == []
    assert [command for command in commands if planted[place].encode() in command] == []


def test_nothing_in_the_home_may_be_read_by_others(seen):
    home = seen[0].folder
    readable = {path: oct(path.lstat().st_mode) for path in (home, *home.rglob("*")) if not path.is_symlink()}
    assert {path: mode for path, mode in readable.items() if not re.search("00$", mode)} == {}
