"""The quickstart runs end to end as for a user: its scores and MLflow records are right, and a second run is cached.

`make test` runs what leads to the champion, whose score needs every training before it; the evaluations of the other
models, each on a server of its own, are nightly. So are tests of recipes that build on the quickstart, with adapters,
GGUF files and another vLLM, which `make test` covers by `test_adapters.py`, `test_serve_adapters.py` and
`test_llama_cpp.py`.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from refreshes import request

from tests import chromium

ROOT = Path(__file__).parents[2]
LIFECYCLE = Path(sys.executable).with_name("lifecycle")
SCORE = "addition.exact_match"
SHARED_WITH_GGUF = {"base", "problems", "sft", "evaluate-sft"}

pytestmark = pytest.mark.timeout(1800)


class Quickstart:
    """The quickstart's recipe in a lifecycle home of its own, with its own servers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "LIFECYCLE_HOME": str(home)}
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)

    def lifecycle(self, *arguments: str) -> str:
        done = subprocess.run(
            [LIFECYCLE, *arguments], cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE, check=True
        )
        return done.stdout

    def mlflow(self, path: str) -> dict[str, Any]:
        return request(f"{self._mlflow}/api/2.0/mlflow/{path}", key=(self.home / "servers.key").read_text().strip())

    @cached_property
    def _mlflow(self) -> str:
        return json.loads(self.lifecycle("status", "--json"))["mlflow"]["url"]

    def run(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.lifecycle("run", "configs/quickstart.yaml", "--json", *arguments))


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    quickstart = Quickstart(tmp_path_factory.mktemp("home"))
    try:
        yield quickstart
    finally:
        quickstart.lifecycle("down")
        assert processes_that_know(quickstart.home) == []


@pytest.fixture(scope="module")
def first(quickstart: Quickstart) -> dict[str, Any]:
    """Provide the refresh of all stages that lead to the champion."""
    return quickstart.run("--until", "promote")


@pytest.fixture(scope="module")
def whole(quickstart: Quickstart, first: dict[str, Any]) -> dict[str, Any]:
    """Provide the refresh of the whole recipe, which evaluates what the first did not."""
    return quickstart.run()


def processes_that_know(folder: Path) -> list[str]:
    """Return the command lines of processes that mention this folder in their environment variables."""
    commands = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "environ").read_bytes():
                commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return commands


def test_every_stage_is_built(first: dict[str, Any]) -> None:
    assert first["state"] == "completed"
    assert {stage["state"] for stage in first["stages"].values()} == {"built"}


def test_training_teaches_addition(first: dict[str, Any]) -> None:
    assert first["stages"]["evaluate-awq"]["metrics"][SCORE] >= 0.90


@pytest.mark.nightly
def test_each_model_scores_as_its_training_lets_expect(first: dict[str, Any], whole: dict[str, Any]) -> None:
    states = {name: stage["state"] for name, stage in whole["stages"].items()}
    assert states == dict.fromkeys(states, "built") | dict.fromkeys(first["stages"], "cached")
    assert whole["stages"].keys() - first["stages"] == {"evaluate-base", "evaluate-sft", "evaluate-dpo"}
    score = {name: stage["metrics"].get(SCORE) for name, stage in whole["stages"].items()}
    assert score["evaluate-base"] <= 0.05
    assert score["evaluate-sft"] >= 0.90
    assert score["evaluate-dpo"] >= score["evaluate-sft"] - 0.02
    assert score["evaluate-awq"] >= score["evaluate-dpo"] - 0.02


def test_preferences_are_learned(first: dict[str, Any]) -> None:
    assert first["stages"]["dpo"]["metrics"]["evaluation_preference_accuracy"] >= 0.95


def test_rows_are_packed_full(first: dict[str, Any]) -> None:
    for stage in ("sft", "dpo"):
        assert first["stages"][stage]["metrics"]["padding_fraction"] <= 0.01


def test_four_bits_change_predictions_little(first: dict[str, Any]) -> None:
    metrics = first["stages"]["awq"]["metrics"]
    assert metrics["kl_nats_per_token"] <= 0.01
    assert metrics["size_after_mib"] < metrics["size_before_mib"]


def test_server_was_measured(first: dict[str, Any]) -> None:
    metrics = first["stages"]["serve"]["metrics"]
    assert metrics["time_to_ready_s"] > 0
    assert metrics["output_tokens_per_s_concurrency_8"] > metrics["output_tokens_per_s_concurrency_1"]


def test_the_report_has_the_metrics_of_the_records_and_opens_without_errors(
    quickstart: Quickstart, first: dict[str, Any], tmp_path: Path
) -> None:
    report = Path(quickstart.lifecycle("report", first["refresh"]).strip())
    assert quickstart.lifecycle("report", "adder@champion").strip() == str(report)
    assert report.stat().st_size < 2_000_000
    with chromium.started() as browser, chromium.opened(browser, report) as (page, seen):
        read = "all => all.map(element => [element.dataset.metric, Number(element.dataset.value)])"
        shown = dict(page.eval_on_selector_all("[data-metric]", read))
        page.screenshot(path=tmp_path / "quickstart.png", full_page=True)
        print(f"screenshot: {tmp_path / 'quickstart.png'}")
        charts = [title.inner_text() for title in page.locator("figure[id^=chart-] > h3").all()]
        assert charts == ["sft", "dpo", "dpo: reward", "dpo: preference accuracy"]
        assert page.locator(".chart canvas").count() == len(charts)
    stages = first["stages"].items()
    assert shown == {f"{name}/{metric}": value for name, one in stages for metric, value in one["metrics"].items()}
    assert seen.errors == []


def test_mlflow_holds_a_run_for_each_stage_under_the_refresh(quickstart: Quickstart, first: dict[str, Any]) -> None:
    parents = set()
    for name, stage in first["stages"].items():
        run = quickstart.mlflow(f"runs/get?run_id={stage['mlflow_run_id']}")["run"]
        tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert run["info"]["status"] == "FINISHED"
        assert (tags["stage"], tags["version"]) == (name, stage["version"])
        parents.add(tags["mlflow.parentRunId"])
    assert len(parents) == 1


def test_mlflow_shows_layout_and_loss_of_training(quickstart: Quickstart, first: dict[str, Any]) -> None:
    run_id = first["stages"]["dpo"]["mlflow_run_id"]
    data = quickstart.mlflow(f"runs/get?run_id={run_id}")["run"]["data"]
    parameters = {parameter["key"]: parameter["value"] for parameter in data["params"]}
    assert parameters["layout.dp_shard"] == "2"
    history = quickstart.mlflow(f"metrics/get-history?run_id={run_id}&metric_key=loss")["metrics"]
    steps = [point["step"] for point in history]
    assert steps == sorted(set(steps))
    assert history[0]["value"] == pytest.approx(0.6931, abs=0.02)


@pytest.mark.nightly
def test_an_adapter_learns_beside_the_cached_model_is_merged_and_served_beside_it(
    quickstart: Quickstart, first: dict[str, Any]
) -> None:
    output = quickstart.lifecycle("run", "configs/quickstart-lora.yaml", "--until", "merged", "--json")
    stages = json.loads(output)["stages"]
    assert {name: stages[name]["state"] for name in ("sft", "dpo", "merged")} == {
        "sft": "cached",
        "dpo": "built",
        "merged": "built",
    }
    assert stages["dpo"]["metrics"]["evaluation_preference_accuracy"] >= 0.9
    assert stages["merged"]["metrics"]["max_abs_logprob_difference"] <= 1e-5

    output = quickstart.lifecycle("run", "configs/quickstart-lora.yaml", "--until", "evaluate-adapter", "--json")
    stages = json.loads(output)["stages"]
    assert stages["dpo"]["state"] == "cached"
    assert stages["serve-adapter"]["metrics"]["max_abs_logprob_difference"] <= 1e-4
    assert stages["serve-adapter"]["metrics"]["max_abs_logprob_difference_dpo"] <= 1e-4
    assert stages["evaluate-adapter"]["metrics"][SCORE] >= 0.9


@pytest.mark.nightly
def test_a_gguf_file_is_served_by_llama_cpp_and_answers_as_the_model_that_it_is_made_from(
    quickstart: Quickstart, whole: dict[str, Any]
) -> None:
    stages = json.loads(quickstart.lifecycle("run", "configs/quickstart-gguf.yaml", "--json"))["stages"]

    assert {name for name, stage in stages.items() if stage["state"] == "cached"} == SHARED_WITH_GGUF
    assert scores_of(quickstart, stages["evaluate-f16"]) == scores_of(quickstart, whole["stages"]["evaluate-sft"])
    assert stages["f16"]["metrics"]["kl_nats_per_token"] <= 1e-4
    assert stages["q8_0"]["metrics"]["compression"] >= 3.5
    assert stages["evaluate-q8_0"]["metrics"][SCORE] >= whole["stages"]["evaluate-sft"]["metrics"][SCORE] - 0.02
    served = stages["serve"]["metrics"]
    assert served["output_tokens_per_s_concurrency_8"] > 0
    assert served["max_abs_logprob_difference"] <= 0.1, "of what training recorded, token by token"
    assert stages["promote"]["metrics"]["gates_missed"] == 0


def scores_of(quickstart: Quickstart, stage: dict[str, Any]) -> dict[int, float]:
    """Return the score (1 if solved, else 0) of each arithmetic problem of an evaluation, by the problem's number."""
    (file,) = (quickstart.home / "store" / "evaluate").glob(f"*-{stage['version']}/samples/addition.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 500
    return {row["doc_id"]: row["exact_match"] for row in rows}


def test_second_run_is_cached(quickstart: Quickstart, first: dict[str, Any]) -> None:
    second = quickstart.run("--until", "promote")
    assert {stage["state"] for stage in second["stages"].values()} == {"cached"}
    versions = {name: stage["version"] for name, stage in first["stages"].items()}
    assert {name: stage["version"] for name, stage in second["stages"].items()} == versions


def test_plan_of_a_changed_learning_rate_names_the_field(quickstart: Quickstart, first: dict[str, Any]) -> None:
    output = quickstart.lifecycle("plan", "configs/quickstart.yaml", "--set", "stages.dpo.learning_rate=2e-4", "--json")
    stages = {stage["name"]: stage for stage in json.loads(output)["stages"]}
    assert "learning_rate" in stages["dpo"]["reason"]
    assert stages["sft"]["action"] == "cached"
    assert {stages[name]["action"] for name in ("dpo", "awq", "serve", "evaluate-awq", "evaluate-dpo")} == {"run"}


def test_artifacts_are_intact_and_nothing_is_left_in_work_folders(
    quickstart: Quickstart, first: dict[str, Any]
) -> None:
    quickstart.lifecycle("verify")
    left = [path for path in (quickstart.home / "store" / ".work").rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.nightly
def test_a_quantized_model_is_served_until_a_person_interrupts(quickstart: Quickstart, first: dict[str, Any]) -> None:
    """`lifecycle serve` serves a quantized model until it is interrupted.

    `make test` covers this by `test_llama_cpp.py`, with a model that llama.cpp serves.
    """
    key = "key-of-a-person"
    command = [LIFECYCLE, "serve", "awq"]
    environment = {**quickstart.environment, "VLLM_API_KEY": key}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        try:
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
            assert [model["id"] for model in fetch(f"{url}/models", key)["data"]] == ["awq"]
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetch(f"{url}/models")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
    assert process.returncode == 0


def fetch(url: str, key: str = "") -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
