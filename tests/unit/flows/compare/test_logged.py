"""Tables that compare MLflow runs; runs that differ in more than the parallel layout are refused by default."""

import pytest

from flows.compare.logged import rows_of_runs
from flows.tracking.logged_runs import LoggedRun
from stages.core.errors import RecipeError

PARAMS = {
    "engine": "fsdp",
    "layout.dp_replicate": "1",
    "layout.dp_shard": "2",
    "layout.tp": "1",
    "layout.micro_batch_size": "4",
    "global_batch_size": "8",
    "method": "sft",
    "data.sequence_length": "256",
}
TAGS = {"hardware": "8 × H100", "git_commit": "abc", "upstream.model": "1"}
METRICS = {"step_time_s": 0.5, "tokens_per_s": 4096.0, "loss": 2.0}


def make_run(name="sft", status="FINISHED", params=PARAMS, metrics=METRICS, **tags):
    return LoggedRun(name, name, status, dict(params), dict(metrics), {**TAGS, **tags})


def test_a_run_becomes_the_row_that_its_parameters_tell_of():
    (row,) = rows_of_runs([make_run()], allow_mixed=False)
    assert (row.text, row.engine, row.num_devices) == ("fsdp dp_shard=2 micro_batch_size=4", "fsdp", 2)
    assert row.metrics["tokens_per_s"] == 4096
    assert row.run_id == "sft"


@pytest.mark.parametrize(("tag", "value"), [("hardware", "8 × A100"), ("git_commit", "def"), ("upstream.model", "2")])
def test_runs_that_differ_in_more_than_the_layout_are_refused_by_name(tag, value):
    with pytest.raises(RecipeError) as error:
        rows_of_runs([make_run(), make_run(**{tag: value})], allow_mixed=False)
    assert f"{tag}: {TAGS[tag]} (1 runs), {value} (1 runs)" in str(error.value)
    assert "--allow-mixed" in str(error.value)


def test_other_work_is_refused_too():
    longer = make_run(params={**PARAMS, "data.sequence_length": "512"})
    with pytest.raises(RecipeError, match=r"data.sequence_length: 256 \(1 runs\), 512 \(1 runs\)"):
        rows_of_runs([make_run(), longer], allow_mixed=False)


def test_asked_for_they_are_mixed():
    runs = [make_run(), make_run(hardware="8 × A100", metrics={**METRICS, "tokens_per_s": 1024.0})]
    rows = rows_of_runs(runs, allow_mixed=True)
    assert [row.metrics["relative_tokens_per_s"] for row in rows] == [1.0, 0.25]


def test_runs_of_a_comparison_keep_its_order_and_other_batches_are_named():
    larger = {**PARAMS, "global_batch_size": "16"}
    tags = [{"lifecycle.comparison": f"night/{number}"} for number in (10, 2)]
    runs = [make_run(**tags[0]), make_run(params=larger, **tags[1])]
    texts = [row.text.rpartition(" ")[2] for row in rows_of_runs(runs, allow_mixed=False)]
    assert texts == ["global_batch_size=16", "global_batch_size=8"]


def test_figures_relative_to_another_comparison_s_first_layout_are_computed_anew():
    (row,) = rows_of_runs([make_run(metrics={**METRICS, "relative_tokens_per_s": 7.0})], allow_mixed=False)
    assert row.metrics["relative_tokens_per_s"] == 1.0


def test_failed_runs_are_rows_with_a_reason_and_other_runs_are_none():
    failed = make_run("broken", "FAILED", metrics={}, error="no memory\nlog")
    others = [make_run(status="RUNNING"), make_run(params={"kind": "download"})]
    rows = rows_of_runs([make_run(), failed, *others], allow_mixed=False)
    assert [row.error for row in rows] == [None, "no memory"]


def test_no_run_of_a_train_stage_is_an_error():
    with pytest.raises(RecipeError, match="none of the 1 runs"):
        rows_of_runs([make_run(params={})], allow_mixed=False)


def test_mixed_runs_are_grouped_by_refresh_stage_and_method_and_compared_within():
    def run(refresh, stage, method, tokens_per_s):
        params, metrics = {**PARAMS, "method": method}, {**METRICS, "tokens_per_s": tokens_per_s}
        return make_run(params=params, metrics=metrics, refresh=refresh, stage=stage)

    runs = [run("a-1", "sft", "sft", 100.0), run("a-1", "dpo", "dpo", 10.0), run("a-1", "sft", "sft", 50.0)]
    rows = rows_of_runs(runs, allow_mixed=True)

    assert [row.text.partition(": ")[0] for row in rows] == ["a-1 sft sft", "a-1 sft sft", "a-1 dpo dpo"]
    assert rows[0].text == "a-1 sft sft: fsdp dp_shard=2 micro_batch_size=4"
    assert [row.metrics["relative_tokens_per_s"] for row in rows] == [1.0, 0.5, 1.0]
