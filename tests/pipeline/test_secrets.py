"""Secrets planted in every place where users put them never appear in any file, output or command line."""

import json
import re
import secrets
import stat
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from refreshes import after, model
from worker_home import STAND_IN, WorkerHome

from stages.data import bad_rows
from stages.hubs.builtin import qwen3
from tests.hub_server import running_hub
from tests.searched import files_with, status_of_all
from tests.serving import SERVING

pytestmark = pytest.mark.timeout(900)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAMPLE_INTERVAL_S = 0.1
PLACES = (
    "HF_TOKEN",
    "VLLM_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MIRROR_PASSWORD",  # in a URL of a recipe
    "OWN_SECRET",  # in the text of an exception, and in a log
    "ROW_KEY",  # in a row of a dataset that is refused
    "UNNAMED",  # in a variable of a recipe, whose name does not tell
    "WEBHOOK",  # in the address of a notification
    "SET_TOKEN",  # in a mapping by `--set`
    "SET_URL",  # in a URL by `--set`
)
IN_THE_ENVIRONMENT = PLACES[:3]


@pytest.fixture(scope="module")
def planted():
    """Provide a made-up secret for each place where users put one, of letters and digits that no encoding changes."""
    return {place: f"planted{place.replace('_', '').lower()}{secrets.token_hex(12)}" for place in PLACES}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, planted):
    """Provide a model hub whose only model requires the planted token."""
    folder = tmp_path_factory.mktemp("model")
    qwen3.make(folder)
    with running_hub() as server:
        repository = server.repository("org/tiny")
        repository.commit({path.name: path.read_bytes() for path in folder.iterdir()})
        repository.token = planted["HF_TOKEN"]
        yield server


def recipe(home, hub, planted):
    """Write a recipe with a stage of every kind that uses a secret, and two stages that fail while using one."""
    rows = home.folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": f"{a + 1}"}) + "\n" for a in range(64)))
    planted_variables = {"OWN_SECRET": planted["OWN_SECRET"], "PYTHONPATH": str(STAND_IN)}
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
            "execution": {"environment": {"OWN_SECRET": planted["OWN_SECRET"], "MY_SETTING": planted["UNNAMED"]}},
        },
        "scores": {**after("sft"), "serving": SERVING, "limit": 4, "execution": {}},
        "mirrored": {
            "kind": "download",
            "model": f"hf://org/absent@{COMMIT}",
            "execution": {"environment": {"HF_ENDPOINT": mirror}},
        },
        "explained": model("quote_secret", "explained", **planted_variables),
        "dead": model("print_secret", "dead", **planted_variables),
    }
    path = home.folder.parent / "secrets.yaml"
    path.write_text(json.dumps({"name": "secrets", "stages": stages}))
    return path


def bad_recipe(home, planted):
    """Write a recipe of its own that trains on an invalid row with a secret: the failed check stops its stages.

    The row lies behind those that a plan reads, which would refuse the whole refresh.
    """
    odd = home.folder.parent / "odd.jsonl"
    good = [{"role": "user", "content": "mine"}, {"role": "assistant", "content": "yours"}]
    rows = [good] * bad_rows.NUM_ROWS + [[{"role": planted["ROW_KEY"], "content": "mine"}]]
    odd.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    stages = {
        "base": {"kind": "download", "model": "hf://org/tiny"},
        "odd": {
            "kind": "download",
            "dataset": f"file://{odd}",
            "execution": {"environment": {"ROW_KEY": planted["ROW_KEY"]}},
        },
        "refused": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "odd", "sequence_length": 32},
            "steps": 1,
            "global_batch_size": 1,
            "learning_rate": 1e-3,
            "execution": {"environment": {"ROW_KEY": planted["ROW_KEY"]}},
        },
    }
    path = home.folder.parent / "bad.yaml"
    path.write_text(json.dumps({"name": "bad", "stages": stages}))
    return path


@pytest.fixture(scope="module")
def seen(tmp_path_factory, hub, planted, new_databases):
    """Provide all that may hold no secret of two scheduled refreshes: home, records, texts, command lines."""
    home = WorkerHome(tmp_path_factory.mktemp("secrets") / "home")
    home.folder.mkdir(mode=0o700)
    new_databases.put_into(home.folder)
    home.environment |= {name: planted[name] for name in IN_THE_ENVIRONMENT}
    home.environment["HOOK"] = f"http://127.0.0.1:9/{planted['WEBHOOK']}"
    home.environment |= {"HF_ENDPOINT": hub.url, "MLFLOW_TRACKING_USERNAME": "me"}
    path = recipe(home, hub, planted)
    with command_lines() as commands:
        home.schedule(path)
        home.schedule(bad_recipe(home, planted))
        shown = [home.lifecycle("notify", "add", "webhook", "--url-from", "HOOK")]
        flow_runs = [home.run_now(name) for name in ("secrets", "bad")]
        shown += [home.lifecycle(*words) for words in (("runs", "--json"), ("show",), ("status",))]
        shown += [home.lifecycle("notify", *words) for words in (("list",), ("test", "webhook"))]
    # A secret given in this way has been shown already; it is in these command lines, and must get no further.
    for override in overrides(planted):
        refused = [home.lifecycle(word, str(path), "--set", override) for word in ("run", "plan")]
        refused.append(home.lifecycle("schedule", str(path), "--cron", "0 3 * * *", "--set", override))
        assert [done.returncode for done in refused] == [3, 3, 3]
        shown += refused
    answered = [json.dumps(answer) for answer in everything(home)]
    record, bad = (home.record(flow_run) for flow_run in flow_runs)
    yield (
        home,
        replace(record, stages={**bad.stages, **record.stages}),
        [
            *(home.logs(flow_run["id"]) for flow_run in flow_runs),
            *answered,
            *(done.stdout + done.stderr for done in shown),
        ],
        commands,
    )
    assert home.lifecycle("down").returncode == 0


def overrides(planted):
    return (
        f"stages.sft.execution.environment={{HUB_TOKEN: {planted['SET_TOKEN']}}}",
        f"stages.base.model=https://me:{planted['SET_URL']}@example.org/model",
    )


def everything(home):
    """Yield all answers of Prefect's and MLflow's APIs to authorized requests, to be searched for secrets."""
    for kind in ("flow_runs", "task_runs", "deployments", "artifacts", "logs", "events", "automations", "flows"):
        yield home.prefect(f"{kind}/filter", {})
    yield home.prefect("block_documents/filter", {})
    runs = {"experiment_ids": ["0", "1"], "max_results": 1000}
    yield home.mlflow("runs/search", runs)
    yield home.mlflow("registered-models/search?max_results=100")


@contextmanager
def command_lines():
    """Collect the command lines of all processes of the machine until the `with` block ends."""
    commands, ended = set(), threading.Event()

    def sample():
        while not ended.wait(SAMPLE_INTERVAL_S):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    commands.add(file.read_bytes())
                except OSError:
                    continue

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield commands
    finally:
        ended.set()
        sampler.join()


def test_the_secrets_were_in_use(seen, hub):
    _, refresh, _, commands = seen
    expected = dict.fromkeys(("base", "rows", "odd", "sft", "scores"), "built")
    found = {name: entry.state for name, entry in refresh.stages.items()}
    assert found == expected | dict.fromkeys(("mirrored", "explained", "dead", "refused"), "failed"), refresh
    assert any(request.headers.get("Authorization", "").startswith("Bearer planted") for request in hub.requests)
    assert any(b"serve" in command and b"--served-model-name" in command for command in commands)


def test_failures_name_the_place_of_a_secret_but_not_the_secret(seen):
    errors = {name: entry.error for name, entry in seen[1].stages.items() if entry.error}
    assert "://me:***@127.0.0.1" in errors["mirrored"]
    assert errors["explained"] == "the server refused ***"
    assert "it was *** that it tried" in errors["dead"]
    assert "***" in errors["refused"]


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_in_no_file_and_no_database(seen, planted, place):
    assert {"prefect.db", "mlflow.db", "server.log", "record.json"} <= {
        p.name for p, _ in status_of_all(seen[0].folder)
    }
    rows = seen[1].stages["odd"].artifact / "data"
    assert [path for path in files_with(seen[0].folder, planted[place]) if not path.is_relative_to(rows)] == []


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_neither_shown_nor_in_a_process_list(seen, planted, place):
    _, _, shown, commands = seen
    assert all(shown)
    assert [text for text in shown if planted[place] in text] == []
    assert [command for command in commands if planted[place].encode() in command] == []


def test_nothing_in_the_home_may_be_read_by_others(seen):
    modes = {path: one.st_mode for path, one in status_of_all(seen[0].folder) if not stat.S_ISLNK(one.st_mode)}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_no_process_may_leave_its_memory_on_the_disk(seen):
    limits = {
        name: Path(f"/proc/{one['process']['pid']}/limits").read_text() for name, one in seen[0].servers().items()
    }
    found = {name: re.search(r"Max core file size +(\S+) +(\S+)", text).groups() for name, text in limits.items()}
    assert found == dict.fromkeys(("prefect", "mlflow", "worker"), ("0", "0"))
