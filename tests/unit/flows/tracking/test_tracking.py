"""Metrics in `metrics.jsonl` are sent to MLflow in batches; parameters and tags contain no secrets."""

import json
from dataclasses import replace

from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index
from flows.tracking.labels import flatten, params_of, tags_of
from flows.tracking.rows import batches, final_rows, rows_of
from stages.core.metric_series import LoggedStep, MetricSeries, last_steps


def log(work, *steps):
    with (work / "metrics.jsonl").open("a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "time_ms": 1000 + step, "loss": float(step)}) + "\n")


def test_batches_are_small_enough_and_end_at_lines(tmp_path):
    log(tmp_path, *range(25))
    found = list(batches(MetricSeries(tmp_path), largest=10))
    assert [len(batch.rows) for batch in found] == [10, 10, 5]
    assert found[-1].next_byte == (tmp_path / "metrics.jsonl").stat().st_size
    resumed = list(batches(MetricSeries(tmp_path, found[0].next_byte), largest=100))
    assert [row.step for batch in resumed for row in batch.rows] == list(range(10, 25))


def test_nothing_beyond_the_last_byte_is_read(tmp_path):
    log(tmp_path, 1)
    end = (tmp_path / "metrics.jsonl").stat().st_size
    log(tmp_path, 2)
    (batch,) = batches(MetricSeries(tmp_path, last_byte=end), largest=10)
    assert [row.step for row in batch.rows] == [1]


def test_known_steps_are_those_before_the_attempt(tmp_path):
    log(tmp_path, 1, 2)
    end = (tmp_path / "metrics.jsonl").stat().st_size
    log(tmp_path, 3)
    assert last_steps(tmp_path, end) == {"loss": 2}
    assert last_steps(tmp_path, 0) == {}


def test_final_figures_belong_to_the_last_step_and_are_told_once(tmp_path):
    log(tmp_path, 1, 2)
    final = {"loss": 2.0, "evaluation_loss": 0.5}
    (row,) = final_rows(final, tmp_path, None, ended_ms=7)
    assert (row.name, row.value, row.step) == ("evaluation_loss", 0.5, 2)
    assert [row.step for row in final_rows(final, tmp_path / "empty", None, ended_ms=7)] == [0, 0]


def test_a_median_is_no_second_point_of_its_curve(tmp_path):
    rows = [{"step": step, "time_ms": step, "tokens_per_s": 100.0 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = final_rows({"tokens_per_s": 200.0}, tmp_path, None, ended_ms=7)
    assert (row.name, row.value, row.step) == ("tokens_per_s_median", 200.0, 3)
    assert [row.name for row in final_rows({"tokens_per_s": 200.0}, tmp_path / "empty", None, ended_ms=7)] == [
        "tokens_per_s"
    ]


def test_nested_parameters_become_dotted():
    tree = {"layout": {"dp_shard": 2, "tp": None}, "tasks": ["a", "b"]}
    assert flatten(tree) == {"layout.dp_shard": "2", "tasks": "a, b"}


def planned_training(tmp_path, **layout):
    recipe = tmp_path / "recipe.yaml"
    sft = {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "rows"},
        "global_batch_size": 4,
        "learning_rate": 1e-3,
        "layout": layout,
        "execution": {"environment": {"HF_TOKEN": "hf_secret"}},
    }
    base = {"kind": "download", "model": "builtin/qwen3-1m"}
    rows = {"kind": "download", "dataset": "builtin/addition"}
    recipe.write_text(json.dumps({"stages": {"base": base, "rows": rows, "sft": sft}}))
    loaded = load_recipe(recipe)
    return plan(loaded, {name: {} for name in loaded.stages}, Index(artifacts=())).stages


def test_parameters_hold_the_identity_and_no_secret(tmp_path):
    stages = planned_training(tmp_path, dp_shard=2)
    params = params_of(stages["sft"])
    assert params["learning_rate"] == "0.001"
    assert params["layout.dp_shard"] == "2"
    assert "hf_secret" not in str(params) + str(tags_of(stages["sft"]))


def test_a_parameter_is_not_left_out_for_a_word_in_its_name_but_a_secret_value_is_redacted(tmp_path):
    sft = planned_training(tmp_path)["sft"]
    config = {"max_tokens": 64, "model": "https://person:hunter2-and-more@hub.example/model"}
    params = params_of(replace(sft, identity={**sft.identity, "config": config}))
    assert params["max_tokens"] == "64"
    assert "hub.example" in params["model"]
    assert "hunter2-and-more" not in str(params)


def test_the_parameter_of_a_source_has_its_path(tmp_path):
    stage = planned_training(tmp_path)["base"]
    config = stage.config.model_copy(update={"model": "file:///models/mine"})
    assert params_of(replace(stage, config=config))["model"] == "file:///models/mine"


def test_tags_name_engine_layout_launcher_and_upstream_versions(tmp_path):
    stages = planned_training(tmp_path, dp_shard=2)
    tags = tags_of(stages["sft"])
    assert (tags["stage"], tags["kind"], tags["engine"], tags["launcher"]) == ("sft", "train", "fsdp", "local")
    assert tags["upstream.model"] == stages["base"].version
    assert tags["upstream.data.dataset"] == stages["rows"].version
    assert "dp_shard=2" in tags["layout"]


def test_equal_layouts_have_equal_texts(tmp_path):
    layouts = [{"dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 1}]
    one, same = (planned_training(tmp_path, **layout)["sft"] for layout in layouts)
    assert tags_of(one)["layout"] == tags_of(same)["layout"]


def test_names_that_mlflow_would_refuse_are_made_acceptable():
    (row,) = rows_of(LoggedStep(1, 1, {"addition.exact_match,strict": 0.5}))
    assert row.name == "addition.exact_match_strict"
