"""A plan is ready within 2 s even if hubs do not answer, and says why the versions of some stages are unknown."""

import socket
import time

import pytest
from huggingface_hub import close_session

from flows.cli.main import main
from flows.planning import outside

RECIPE = """
name: small
stages:
  base: {{kind: download, model: "{model}"}}
  rows: {{kind: download, dataset: "{dataset}"}}
  sft: {{kind: train, model: base, method: sft, data: {{dataset: rows, sequence_length: 64}}, layout: {layout},
    global_batch_size: 8, learning_rate: 1e-4}}
  int8: {{kind: quantize, model: sft, method: int8, calibration: {{dataset: rows}}}}
  server: {{kind: serve, model: sft}}
{more}
"""
LONGEST_S = 25
"""Time limit of a plan in seconds; an idle machine needs 2 s, a single attempt at asking a hub takes 30 s."""


@pytest.fixture
def silent():
    """Provide the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def each_attempt_ends(monkeypatch):
    """Raise the planner's time limit, so that a silent hub's request fails first, with a reason, on a busy machine."""
    monkeypatch.setattr(outside, "PLANNING_LIMIT_S", 2 * LONGEST_S)


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Provide a function that runs `lifecycle plan` and returns the printed lines, by stage name."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    close_session()  # which keeps the proxy of an earlier test

    def run(model="builtin/qwen3-1m", dataset="builtin/addition", layout="{dp_shard: 1}", more=""):
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.format(model=model, dataset=dataset, layout=layout, more=more))
        began_s = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main(["plan", str(path)])
        assert ended.value.code == 0 and time.monotonic() - began_s < LONGEST_S
        return {line.partition(" ")[0]: line for line in capsys.readouterr().out.splitlines()}

    return run


def is_unknown(line):
    return line.split()[2] == "unknown"


@pytest.mark.parametrize("layout", ["auto", "{dp_shard: 1}"])
def test_a_hub_that_refuses_is_asked_once(plan, refusing, monkeypatch, each_attempt_ends, layout):
    monkeypatch.setenv("HF_ENDPOINT", refusing)
    lines = plan(model="hf://org/name", layout=layout)
    assert is_unknown(lines["base"]) and f"asking {refusing} for hf://org/name" in lines["base"]
    assert "Connection refused" in lines["base"] and "attempts" not in lines["base"]
    assert not is_unknown(lines["rows"]) and is_unknown(lines["sft"]) and is_unknown(lines["server"])
    assert ("layout: auto, which needs the model's sizes" in lines["sft"]) == (layout == "auto")


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "HTTPS_PROXY", "MODELSCOPE_ENDPOINT"])
def test_a_hub_or_a_proxy_that_takes_the_question_and_never_answers_is_not_waited_for(
    plan, silent, monkeypatch, each_attempt_ends, variable
):
    monkeypatch.setenv(variable, silent)
    lines = plan(model="modelscope://org/name" if variable == "MODELSCOPE_ENDPOINT" else "hf://org/name")
    assert is_unknown(lines["base"]) and is_unknown(lines["sft"])
    assert "no whole answer within" in lines["base"] or "timed out" in lines["base"]


def test_a_config_that_never_comes_of_a_known_revision_is_not_waited_for(plan, silent, monkeypatch, each_attempt_ends):
    monkeypatch.setenv("HF_ENDPOINT", silent)
    lines = plan(model=f"hf://org/name@{'5a' * 20}", layout="auto")
    assert not is_unknown(lines["base"]) and is_unknown(lines["sft"]) and is_unknown(lines["int8"])


def test_the_datasets_of_tasks_are_not_waited_for(plan, silent, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", silent)
    lines = plan(more="  scores: {kind: evaluate, model: base, tasks: [arc_easy, hellaswag]}")
    assert is_unknown(lines["scores"]) and not is_unknown(lines["sft"])


def test_files_that_take_long_to_hash_are_left_to_the_refresh(plan, tmp_path, each_attempt_ends):
    rows = tmp_path / "rows.jsonl"
    with rows.open("wb") as stream:
        stream.truncate(1 << 40)
    lines = plan(dataset=f"file://{rows}")
    assert is_unknown(lines["rows"]) and "hashing its 1024.0 GiB takes longer than" in lines["rows"]
