"""Predicted memory and time become metrics of a train stage; a run that cannot fit is refused before it starts."""

from dataclasses import replace

import pytest

from stages.core.errors import LayoutError
from stages.kinds.train.config import TrainConfig
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import built_in
from stages.planner.prediction import (
    alternatives,
    check_memory,
    check_teacher_memory,
    closest,
    predicted_metrics,
    teacher_memory_gib,
)
from stages.planner.search import UNCERTAINTY, estimate

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


def predict(**layout):
    config = make_config(**layout)
    request = SearchRequest(SHAPE, config.workload, built_in("h100-80gb"), config.layout.world_size)
    return request, estimate(request, config.engine, config.layout)


LARGER = replace(SHAPE, num_layers=64, ffn_size=2 * 14336)


def test_a_teacher_needs_its_weights_and_neither_gradients_nor_moments():
    request, candidate = predict(dp_shard=8, recompute="full")
    own_gib = teacher_memory_gib(request, candidate)
    weights_gib = candidate.memory.worst.weights
    assert weights_gib < own_gib < candidate.memory.peak_gib - 2 * weights_gib
    larger_gib = teacher_memory_gib(replace(request, shape=LARGER), candidate)
    assert larger_gib - own_gib > 4 * (LARGER.num_parameters - SHAPE.num_parameters) / 8 / 2**30


def test_a_teacher_that_does_not_fit_is_named_alone_or_beside_the_model():
    request, candidate = predict(dp_shard=8, recompute="full")
    teacher_gib = teacher_memory_gib(replace(request, shape=LARGER), candidate)
    enough_gib = max(teacher_gib, candidate.memory.peak_gib) * 1.2
    check_teacher_memory(teacher_gib, candidate, enough_gib, beside_model=False)
    with pytest.raises(LayoutError, match=r"the teacher would run out of memory .* of the model that learns, avail"):
        check_teacher_memory(teacher_gib, candidate, enough_gib, beside_model=True)
    with pytest.raises(LayoutError, match=rf"predicted {teacher_gib:.1f} GiB a device, available .* or have it served"):
        check_teacher_memory(teacher_gib, candidate, 0.8 * teacher_gib, beside_model=False)


def test_what_fits_is_let_through():
    request, candidate = predict(dp_shard=8, recompute="full")
    check_memory(request, candidate, available_gib=built_in("h100-80gb").memory_gib)


def test_an_uncertain_prediction_is_let_through():
    request, candidate = predict(dp_shard=8, recompute="full")
    check_memory(request, candidate, available_gib=candidate.memory.peak_gib * (1 - UNCERTAINTY / 2))


def test_a_run_that_cannot_fit_is_refused_with_a_layout_that_fits():
    request, candidate = predict(dp_shard=8, micro_batch_size=8)
    available_gib = candidate.memory.peak_gib / 2
    with pytest.raises(LayoutError) as error:
        check_memory(request, candidate, available_gib)
    message = str(error.value)
    assert "would run out of memory" in message
    assert f"predicted {candidate.memory.peak_gib:.1f} GiB a device" in message
    assert f"available {available_gib:.1f} GiB" in message
    suggested = message.partition("the closest that fits: fsdp ")[2].partition(" (")[0]
    fields = dict(pair.split("=") for pair in suggested.split())
    layout = Layout.model_validate_strings(fields)
    assert layout.world_size == 8
    assert estimate(request, "fsdp", layout).memory.peak_gib <= available_gib


def test_where_nothing_fits_it_says_so():
    request, candidate = predict(dp_shard=8)
    with pytest.raises(LayoutError, match="no layout of 8 devices fits"):
        check_memory(request, candidate, available_gib=0.5)


def test_the_closest_layout_differs_in_the_fewest_fields():
    request, chosen = predict(dp_shard=8, micro_batch_size=4)
    near, far = (
        estimate(request, "fsdp", Layout(dp_shard=8, **fields))
        for fields in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "recompute": "full"})
    )
    assert closest(chosen, [far, near]) is near


def test_alternatives_are_the_fastest_first():
    request, _ = predict(dp_shard=8)
    times_s = [one.time.step_time_s for one in alternatives(request)]
    assert times_s == sorted(times_s)
    assert times_s


def test_a_bubble_is_predicted_of_pipelines_only():
    _, candidate = predict(dp_shard=8)
    assert predicted_metrics(candidate).keys() == {"predicted_step_time_s", "predicted_memory_gib"}
