"""A recipe trains on Megatron-core under TP and PP, logs its metrics to MLflow, and is cached when it is run again."""

import json

import pytest
from refreshes import ROOT, ForkedHome, states
from safetensors import safe_open

NUM_STEPS = 3
NOT_FOR_NUMBERS = {"execution": {"threads": 1, "measure_matmul_rate": False}}


@pytest.fixture(scope="module")
def home(lent_home):
    home = ForkedHome(lent_home)
    yield home
    assert home.processes() == []


def shortened(home):
    """Return the quickstart's recipe up to the DPO stage, with few training steps."""
    import yaml

    recipe = yaml.safe_load((ROOT / "configs" / "quickstart-megatron.yaml").read_text())
    stages = {name: recipe["stages"][name] for name in ("base", "problems", "preferences", "sft", "dpo")}
    for name in ("sft", "dpo"):
        stages[name] |= {"steps": NUM_STEPS, "warmup_steps": 1, **NOT_FOR_NUMBERS}
        stages[name]["data"] |= {"evaluation_split": None}
    return home.recipe("short", **stages)


@pytest.fixture(scope="module")
def recipe(home):
    return shortened(home)


@pytest.fixture(scope="module")
def refresh(home, recipe):
    done = home.lifecycle("run", str(recipe), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_planned_before_anything_runs(home, recipe):
    planned = home.lifecycle("plan", str(recipe))
    assert planned.returncode == 0, planned.stderr
    assert "sft" in planned.stdout and "dpo" in planned.stdout


def test_both_layouts_train_and_write_models_that_transformers_reads(home, refresh):
    assert set(states(refresh).values()) == {"built"}
    shapes = []
    for name in ("base", "sft", "dpo"):
        (file,) = home.folder.glob(f"store/*/{name}-*/model/model.safetensors")
        with safe_open(file, "pt") as weights:
            shapes.append({key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()})  # noqa: SIM118
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(("stage", "layout"), [("sft", "tp=2"), ("dpo", "pp=2")])
def test_mlflow_has_layout_and_metrics(home, refresh, stage, layout):
    (run,) = home.attempts(stage)
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert tags["engine"] == "megatron"
    assert layout in tags["layout"]
    metrics = {metric["key"] for metric in run["data"]["metrics"]}
    wanted = {"loss", "tokens_per_s", "communication_fraction", "peak_memory_gib", "predicted_memory_gib"}
    wanted |= {"pipeline_bubble_fraction", "predicted_pipeline_bubble_fraction"} if stage == "dpo" else set()
    assert wanted <= metrics
    assert home.losses(run) == [1, 2, 3]


def test_dpo_begins_at_ln_2(home, refresh):
    (run,) = home.attempts("dpo")
    history = home.mlflow(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key=loss")["metrics"]
    assert history[0]["value"] == pytest.approx(0.693147, abs=1e-5)


def test_again_it_is_cached(home, recipe, refresh):
    again = json.loads(home.lifecycle("run", str(recipe), "--json").stdout)
    assert set(states(again).values()) == {"cached"}
