"""`lifecycle compare` trains a stage under several layouts, with reasons for those that cannot run; real servers."""

import json
from pathlib import Path

import pytest
from refreshes import Home
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.hubs.builtin.qwen3 import make_tokenizer

BASELINE, SHARDED, IMPOSSIBLE = "fsdp micro_batch_size=2", "fsdp dp_shard=2 micro_batch_size=2", "megatron tp=3"
INDIVISIBLE = "fsdp dp_shard=3"
NUM_STEPS, NUM_WARMUP_STEPS, NUM_ROUNDS = 3, 1, 2
STAGES = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "problems": {"kind": "download", "dataset": "builtin/addition"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "problems", "sequence_length": 64},
        "layout": "auto",
        "global_batch_size": 4,
        "learning_rate": 1e-3,
        "precision": "fp32",
    },
}
EXPERIMENT = "llm-lifecycle"
SPLIT = ("fsdp tp=2 micro_batch_size=2", "fsdp cp=2 micro_batch_size=2", "fsdp dp_shard=2 ep=2 micro_batch_size=2")
UNFIT = {
    "fsdp tp=3": "tp 3 does not divide the model's 4 attention heads",
    "fsdp dp_shard=4 ep=3": "ep 3 does not divide dp_shard 4",
    "fsdp dp_shard=2 ep=2 compile=true": "`layout.ep: 2` with `engine: fsdp` does not go with `layout.compile`",
}


@pytest.fixture(scope="module")
def home(lent_home):
    home = Home(lent_home)
    yield home
    assert home.processes() == []


@pytest.fixture(scope="module")
def recipe(home):
    return home.recipe("tiny", **STAGES)


@pytest.fixture(scope="module")
def compared(home, recipe):
    """Provide the JSON output of `lifecycle compare` for two layouts that run and two that cannot run."""
    layouts = home.folder.parent / "layouts.txt"
    layouts.write_text(f"# two that run\n{BASELINE}\n{SHARDED}\n")
    measuring = ["--steps", str(NUM_STEPS), "--warmup", str(NUM_WARMUP_STEPS), "--rounds", str(NUM_ROUNDS)]
    options = ["--stage", "sft", "--layouts", str(layouts), IMPOSSIBLE, INDIVISIBLE, *measuring]
    done = home.lifecycle("compare", str(recipe), *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(compared):
    return {row["layout"]: row for row in compared["layouts"]}


@pytest.fixture(scope="module")
def runs(home, compared):
    """Provide the MLflow runs of a comparison of layouts by name, including their parent run."""
    wanted = {"experiment_ids": ["1"], "filter": f"tags.comparison = '{compared['comparison']}'"}
    found = home.mlflow("runs/search", wanted)["runs"]
    return {run["info"]["run_name"]: run for run in found}


def values(run, what):
    return {entry["key"]: entry["value"] for entry in run["data"].get(what, [])}


def test_a_layout_that_cannot_run_is_a_row_with_its_reason(compared, rows):
    assert compared["state"] == "completed"
    assert list(rows) == [BASELINE, SHARDED, IMPOSSIBLE, INDIVISIBLE]
    assert "tp 3 does not divide the model's 4 attention heads" in rows[IMPOSSIBLE]["error"]
    assert "global_batch_size 4 is not divisible" in rows[INDIVISIBLE]["error"]
    assert rows[IMPOSSIBLE]["metrics"] == rows[INDIVISIBLE]["metrics"] == {}


def test_the_loss_does_not_depend_on_the_layout(rows):
    baseline, sharded = rows[BASELINE]["metrics"], rows[SHARDED]["metrics"]
    assert baseline["loss_difference"] == 0
    assert abs(sharded["loss_difference"]) < 1e-5
    assert sharded["loss"] == pytest.approx(baseline["loss"], abs=1e-5)


def test_every_process_tells_its_memory_and_the_prediction_stands_beside_it(rows):
    sharded = rows[SHARDED]["metrics"]
    ranks = [sharded[f"peak_memory_gib_rank_{rank}"] for rank in range(2)]
    assert sharded["peak_memory_gib"] == pytest.approx(max(ranks), rel=0.1)
    assert sharded["predicted_memory_gib"] > 0
    assert sharded["predicted_step_time_s"] > 0


def test_mlflow_has_a_run_a_layout_under_one_parent(compared, rows, runs):
    parent = runs[compared["comparison"]]
    children = {name: run for name, run in runs.items() if run is not parent}
    assert children.keys() == rows.keys()
    assert {values(run, "tags")["mlflow.parentRunId"] for run in children.values()} == {parent["info"]["run_id"]}
    assert values(runs[SHARDED], "params")["layout.dp_shard"] == "2"
    assert runs[IMPOSSIBLE]["info"]["status"] == runs[INDIVISIBLE]["info"]["status"] == "FAILED"
    logged = values(runs[SHARDED], "metrics")
    assert logged["step_time_s"] == pytest.approx(rows[SHARDED]["metrics"]["step_time_s"])


def test_every_name_in_mlflow_is_in_the_table_of_names(runs):
    from tests.metric_names import METRICS

    for run in runs.values():
        for name in values(run, "metrics"):
            assert name in METRICS or "_rank_" in name, name


def test_all_rounds_are_in_the_curves(home, runs):
    steps = home.losses(runs[SHARDED])
    assert sorted(set(steps)) == list(range(1, NUM_ROUNDS * (NUM_STEPS + NUM_WARMUP_STEPS) + 1))


def test_prefect_has_the_table_and_mlflow_the_report(home, compared, runs):
    found = home.prefect("artifacts/filter", {"artifacts": {"key": {"any_": ["layouts"]}}})
    table = json.loads(found[0]["data"])
    assert [row["layout"] for row in table] == [BASELINE, SHARDED, IMPOSSIBLE, INDIVISIBLE]
    run_id = runs[compared["comparison"]]["info"]["run_id"]
    files = home.mlflow(f"artifacts/list?run_id={run_id}")["files"]
    assert {file["path"] for file in files} == {"report.html", "comparison.json"}


def test_the_report_has_the_layouts_and_why_some_could_not_run(compared):
    page = Path(compared["report"]).read_text()
    assert '<h2 id="layouts">Layouts</h2>' in page
    assert f'data-layout="{SHARDED}/Throughput"' in page
    assert f"<code>{IMPOSSIBLE}</code>: " in page and f"<code>{INDIVISIBLE}</code>: " in page


def test_nothing_of_a_trial_is_in_the_store(home, compared):
    assert [path.name.rpartition("-")[0] for path in (home.folder / "store" / "download").iterdir()]
    assert not (home.folder / "store" / "train").exists()
    assert not list((home.folder / "store" / ".work").glob("train/sft-*/config.json"))
    assert not list(home.folder.glob("ledger/*/trials/*/scratch"))


def test_the_same_table_comes_from_the_runs_in_mlflow(home, rows):
    done = home.lifecycle("compare", "--experiment", EXPERIMENT, "--where", "tags.stage = 'sft'", "--json")
    assert done.returncode == 0, done.stderr
    found = {row["layout"]: row for row in json.loads(done.stdout)["layouts"]}
    assert found.keys() == rows.keys()
    assert found[SHARDED]["metrics"]["step_time_s"] == pytest.approx(rows[SHARDED]["metrics"]["step_time_s"])
    assert found[SHARDED]["num_devices"] == 2


@pytest.mark.nightly
def test_matrices_tokens_and_experts_are_split_beside_one_process(home):
    """A mixture of experts, measured on two processes each way, beside what was predicted; the loss is the same."""
    folder = home.folder.parent / "mixture"
    make_tokenizer().save_pretrained(folder)
    sizes = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32, "head_dim": 16}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, max_position_embeddings=128)).save_pretrained(folder)
    recipe = home.recipe("mixture", **{**STAGES, "base": {"kind": "download", "model": f"file://{folder}"}})
    measuring = ["--steps", "2", "--warmup", "1", "--rounds", "1"]
    done = home.lifecycle(
        "compare", str(recipe), "--stage", "sft", "--layouts", BASELINE, *SPLIT, *UNFIT, *measuring, "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = {row["layout"]: row for row in json.loads(done.stdout)["layouts"]}
    assert rows.keys() == {BASELINE, *SPLIT, *UNFIT}
    for layout in (BASELINE, *SPLIT):
        metrics = rows[layout]["metrics"]
        assert rows[layout]["error"] is None and abs(metrics["loss_difference"]) < 1e-5
        assert metrics["step_time_s"] > 0 and metrics["predicted_step_time_s"] > 0
        assert metrics["peak_memory_gib"] > 0 and metrics["predicted_memory_gib"] > 0
    for layout, reason in UNFIT.items():
        assert reason in rows[layout]["error"] and not rows[layout]["metrics"]


def test_a_wrong_layout_stops_before_anything_starts(home, recipe):
    done = home.lifecycle("compare", str(recipe), "--stage", "sft", "--layouts", "fsdp dp_shrad=2", "fsdb")
    assert done.returncode == 3
    assert "unknown key `dp_shrad`; did you mean `dp_shard`?" in done.stderr
    assert "did you mean `fsdp`?" in done.stderr


def test_too_few_runs_calibrate_nothing(home, compared):
    done = home.lifecycle("calibrate", "--where", "params.`layout.dp_shard` = '2'")
    assert done.returncode == 3
    assert "expected at least 3" in done.stderr
    assert not (home.folder / "hardware.yaml").exists()
