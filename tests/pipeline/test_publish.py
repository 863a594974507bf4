"""A promoted model is published to a hub that fails at first; a model that is not promoted is not published."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from refreshes import ForkedHome, states

from stages.core.errors import NotPromotedError
from tests.forked import run_forked
from tests.hub_server import Fault, running_hub
from tests.promotion import NAME, candidate_tree
from tests.searched import files_with
from tests.serving import write_tasks

pytestmark = pytest.mark.timeout(900)

PROGRAM = Path(__file__).with_name("candidate_refresh.py")
TOKEN = "hf_token_of_the_pipeline_tests"
REPOSITORY = "owner/adder"


class Nights(ForkedHome):
    """A lifecycle home whose nightly recipe publishes every promoted model."""

    def night(self, model: str, right: int) -> subprocess.CompletedProcess[str]:
        tree = candidate_tree(model, min_scores={"sums.exact_match": 0.5})
        tree["scores"] |= {"limit": right, "task_folder": str(self.folder.parent / "tasks")}
        execution = {"execution": {"retries": 0}}
        tree["publish"] = {"kind": "publish", "promotion": "promote", "to": f"hf://{REPOSITORY}", **execution}
        return run_forked(PROGRAM, self.recipe("nightly", **tree), "--json", environment=self.environment)

    def tasks_in_prefect(self, refresh: str) -> dict[str, str]:
        """Return the Prefect state name of each of a refresh's tasks."""
        found = self.prefect("task_runs/filter", {"flow_runs": {"name": {"any_": [refresh]}}})
        return {task["name"]: task["state"]["name"] for task in found}


@pytest.fixture(scope="module")
def hub():
    with running_hub() as server:
        server.token_roles = {TOKEN: "write"}
        yield server


@pytest.fixture(scope="module")
def nights(lent_home, hub):
    nights = Nights(lent_home)
    nights.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    write_tasks(nights.folder.parent / "tasks")
    return nights


@pytest.fixture(scope="module")
def failed(nights, hub) -> dict[str, Any]:
    """Provide the JSON output of a refresh in which the hub accepts the uploaded weights but refuses the commit."""
    hub.faults = [Fault("/commit/main", status=503)]
    done = nights.night("a", right=90)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def retried(nights, failed) -> dict[str, Any]:
    done = nights.lifecycle("retry", failed["refresh"], "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_publication_that_fails_undoes_no_promotion(nights, hub, failed):
    assert failed["state"] == "failed"
    assert (failed["stages"]["promote"]["verdict"], failed["stages"]["publish"]["state"]) == ("promoted", "failed")
    assert "hub answered 503" in failed["stages"]["publish"]["error"]
    assert json.loads(nights.lifecycle("champion", NAME, "--json").stdout)["version"] == "1"
    assert set(hub.repositories[REPOSITORY].files_at("main")) == {".gitattributes"}


def test_a_retry_publishes_and_sends_no_weights_again(nights, hub, retried):
    assert (states(retried)["promote"], states(retried)["publish"]) == ("cached", "built")
    files = hub.repositories[REPOSITORY].files_at("main")
    weights = next(nights.folder.glob("store/download/model-*/model/model.safetensors")).read_bytes()
    assert files["model.safetensors"] == weights
    assert sum(count for name, count in hub.served_bytes.items() if name.startswith("uploaded")) == len(weights)
    assert b"sums.exact_match | 0.9000" in files["README.md"]
    (run,) = (run for run in nights.attempts("publish") if run["info"]["status"] == "FINISHED")
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert tags["published_to"] == f"hf://{REPOSITORY}"
    assert tags["published_revision"] == hub.repositories[REPOSITORY].refs["main"]


def test_a_candidate_that_is_not_promoted_stays_in_the_house(nights, hub, retried):
    commit = hub.repositories[REPOSITORY].refs["main"]
    worse = nights.night("b", right=20)
    assert worse.returncode == NotPromotedError.exit_code
    record = json.loads(worse.stdout)
    assert states(record)["publish"] == "built"
    assert nights.tasks_in_prefect(record["refresh"])["publish"] == "Completed"
    assert hub.repositories[REPOSITORY].refs["main"] == commit


def test_no_token_stands_in_what_is_kept(nights, retried):
    assert files_with(nights.folder, TOKEN) == []
