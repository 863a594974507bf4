"""Fitting the planner's constants to simulated runs recovers the constants with which they were simulated."""

from dataclasses import replace

import pytest

from flows.compare.calibration import (
    as_yaml,
    fit,
    mean_errors,
    observations_of,
    rank_correlation,
    why_left_out,
    with_constants,
)
from flows.tracking.logged_runs import LoggedRun
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.adapted import PlannedAdapter
from stages.planner.hardware import cpu_of, from_yaml
from stages.planner.workload import ExtraPasses, Workload

START = cpu_of(4)
TRUTH = with_constants(
    START,
    {
        "matmul": 0.3,
        "attention": 0.2,
        "memory": 0.5,
        "intra_link": 0.1,
        "launch_s": 1e-4,
        "runtime_gib": 0.8,
        "intra_node_latency_s": 1.8e-3,
    },
)
SHAPE = ModelShape(
    num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1536, vocab_size=8000
)
LAYOUTS = [
    Layout(dp_shard=dp_shard, micro_batch_size=rows, recompute=recompute)
    for dp_shard in (1, 2, 4)
    for rows in (1, 4)
    for recompute in ("none", "full")
]


def make_run(number, layout, sequence_length=512):
    params = {f"layout.{name}": str(value) for name, value in layout.model_dump(exclude_none=True).items()}
    params |= {"engine": "fsdp", "global_batch_size": "16", "precision": "fp32", "method": "sft"}
    params["data.sequence_length"] = str(sequence_length)
    tags = {"model_shape": SHAPE.to_json(), "device": "cpu"}
    return LoggedRun(str(number), "sft", "FINISHED", params, {"step_time_s": 1.0, "peak_memory_gib": 1.0}, tags)


@pytest.fixture(scope="module")
def observations():
    runs = [make_run(number, layout, tokens) for number, layout in enumerate(LAYOUTS) for tokens in (256, 1024)]
    measured = []
    for one in observations_of(runs, START):
        truth = one.predict(TRUTH)
        measured.append(replace(one, step_time_s=truth.time.step_time_s, memory_gib=truth.memory.peak_gib))
    return measured


@pytest.fixture(scope="module")
def calibration(observations):
    return fit(observations, START)


def test_predictions_are_as_good_as_the_truth_s(calibration):
    step_time, memory = mean_errors(calibration, calibration.hardware)
    assert mean_errors(calibration, START)[0] > 0.3
    assert step_time < 0.1
    assert memory < 0.05


def test_layouts_are_ranked_as_measured(calibration):
    assert rank_correlation(calibration, calibration.hardware) > 0.95


def test_what_runs_tell_apart_is_found_again(calibration):
    assert calibration.constants["runtime_gib"] == pytest.approx(0.8, rel=0.1)
    assert calibration.constants["matmul"] == pytest.approx(0.3, rel=0.3)


def test_shares_stay_shares(observations):
    impossibly_fast = [replace(one, step_time_s=one.step_time_s / 1000) for one in observations]
    constants = fit(impossibly_fast, START).constants
    assert all(0 < constants[name] <= 1.001 for name in ("matmul", "attention", "memory", "intra_link"))


def test_what_is_already_right_stays(observations):
    exact = [
        replace(one, step_time_s=one.predict(START).time.step_time_s, memory_gib=one.predict(START).memory.peak_gib)
        for one in observations
    ]
    calibration = fit(exact, START)
    assert calibration.constants == pytest.approx(calibration.constants | fit(exact[:3], START).constants, rel=0.05)
    assert mean_errors(calibration, calibration.hardware)[0] < 0.01


def test_the_file_is_read_back_as_the_hardware(calibration, tmp_path):
    path = tmp_path / "hardware.yaml"
    path.write_text(as_yaml(calibration, "cpu", "an experiment"))
    read = from_yaml(path)
    one = calibration.observations[0]
    assert one.predict(read).time.step_time_s == pytest.approx(
        one.predict(calibration.hardware).time.step_time_s, rel=0.01
    )


def test_a_run_is_predicted_for_what_it_trained(observations):
    adapter = Workload(512, 16, "fp32", passes=ExtraPasses(2, 1), adapter=PlannedAdapter(4, ("q_proj",), dropout=0.1))
    run = make_run(0, LAYOUTS[0])
    (whole,), (one,) = (observations_of([replace(run, tags=run.tags | more)], START) for more in
                        ({}, {"workload": adapter.to_json()}))  # fmt: skip
    assert one.request.workload == adapter
    found, all_weights = one.predict(TRUTH), whole.predict(TRUTH)
    assert found.memory.worst.optimizer < all_weights.memory.worst.optimizer / 50
    assert found.time.parts.method_passes > 0 == all_weights.time.parts.method_passes
    measured = replace(one, step_time_s=found.time.step_time_s, memory_gib=found.memory.peak_gib)
    assert mean_errors(fit([*observations, measured], START), TRUTH) == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "named"),
    [({"adapter.rank": "8"}, "adapter"), ({"method": "kto"}, "kto"), ({"method": "reward"}, "reward")],
)
def test_runs_that_do_not_record_what_they_trained_are_left_out_by_name(params, named):
    run = make_run(0, LAYOUTS[0])
    run = replace(run, params=run.params | params)
    assert observations_of([run], START) == []
    assert named in why_left_out(run)
    assert "step_time_s" in why_left_out(replace(run, metrics={"peak_memory_gib": 1.0}))


def test_runs_that_do_not_tell_their_model_are_left_out():
    run = make_run(0, LAYOUTS[0])
    assert len(observations_of([run, replace(run, tags={}), replace(run, metrics={})], START)) == 1
