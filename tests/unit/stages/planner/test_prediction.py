"""Predictions for the machine at hand: whose share of it a process has, and which runs are doomed."""

from dataclasses import replace

import pytest

from stages.core.errors import LayoutError
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.hardware import built_in
from stages.planner.prediction import (
    UNCERTAINTY,
    alternatives,
    check_memory,
    closest,
    cpu_of,
    hardware_at_hand,
    named_like,
    predict,
    predicted_figures,
    question_of,
    shape_as_text,
    shape_from_text,
    shared_cpu,
)
from stages.planner.search import estimate
from stages.train.config import TrainConfig

SHAPE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)


def make_config(**layout):
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows", "sequence_length": 4096},
            "global_batch_size": 64,
            "learning_rate": 1e-5,
            "layout": layout,
        }
    )


def ask(**layout):
    config = make_config(**layout)
    question = question_of(config, SHAPE, built_in("h100-80gb"))
    return question, predict(question, config)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_devices_are_known_by_their_names(device, name):
    assert named_like(device).name == name


def test_an_unknown_device_is_described_by_nobody():
    assert named_like("Abacus 3000") is None
    assert hardware_at_hand("Abacus 3000", 1, None) is None


def test_a_description_on_file_goes_before_the_built_in_ones(tmp_path):
    file = tmp_path / "hardware.yaml"
    file.write_text("like: h200\nbf16_tflops: 500\n")
    assert hardware_at_hand("NVIDIA H200", 8, file).bf16_tflops == 500
    assert hardware_at_hand("NVIDIA H200", 8, tmp_path / "none.yaml").bf16_tflops == built_in("h200").bf16_tflops


def test_processes_share_a_cpu_and_no_more_than_all_of_it():
    machine = cpu_of(8)
    shares = shared_cpu(machine, 4)
    assert 4 * shares.fp32_tflops == pytest.approx(machine.fp32_tflops)
    assert 4 * shares.memory_gib == pytest.approx(machine.memory_gib)
    assert cpu_of(8).fp32_tflops == pytest.approx(2 * cpu_of(4).fp32_tflops)


def test_a_shape_survives_being_text():
    mixture = replace(SHAPE, num_experts=8, experts_per_token=2, expert_ffn_size=512, dense_layers=frozenset({0, 3}))
    assert shape_from_text(shape_as_text(SHAPE)) == SHAPE
    assert shape_from_text(shape_as_text(mixture)) == mixture


def test_what_fits_is_let_through():
    question, candidate = ask(dp_shard=8, recompute="full")
    check_memory(question, candidate, free_gib=built_in("h100-80gb").memory_gib)


def test_an_uncertain_prediction_is_let_through():
    question, candidate = ask(dp_shard=8, recompute="full")
    check_memory(question, candidate, free_gib=candidate.memory.peak_gib * (1 - UNCERTAINTY / 2))


def test_a_doomed_run_is_refused_with_a_layout_that_fits():
    question, candidate = ask(dp_shard=8, micro_batch_size=8)
    free_gib = candidate.memory.peak_gib / 2
    with pytest.raises(LayoutError) as error:
        check_memory(question, candidate, free_gib)
    message = str(error.value)
    assert "would run out of memory" in message
    assert f"free are {free_gib:.1f} GiB" in message
    suggested = message.partition("the closest that fits: fsdp ")[2].partition(" (")[0]
    fields = dict(pair.split("=") for pair in suggested.split())
    layout = Layout.model_validate_strings(fields)
    assert layout.world_size == 8
    assert estimate(question, "fsdp", layout).memory.peak_gib <= free_gib


def test_where_nothing_fits_it_says_so():
    question, candidate = ask(dp_shard=8)
    with pytest.raises(LayoutError, match="no layout of 8 devices fits"):
        check_memory(question, candidate, free_gib=0.5)


def test_the_closest_layout_differs_in_the_fewest_fields():
    question, asked = ask(dp_shard=8, micro_batch_size=4)
    near, far = (
        estimate(question, "fsdp", Layout(dp_shard=8, **fields))
        for fields in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "recompute": "full"})
    )
    assert closest(asked, [far, near]) is near


def test_alternatives_are_the_fastest_first():
    question, _ = ask(dp_shard=8)
    times_s = [one.time.step_time_s for one in alternatives(question)]
    assert times_s == sorted(times_s)
    assert times_s


def test_a_bubble_is_predicted_of_pipelines_only():
    _, candidate = ask(dp_shard=8)
    assert predicted_figures(candidate).keys() == {"predicted_step_time_s", "predicted_memory_gib"}
