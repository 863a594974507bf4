"""Learning rates follow the schedules' formulas."""

from itertools import pairwise

import pytest
import torch
from transformers import get_scheduler

from stages.kinds.train.config import TrainConfig
from stages.kinds.train.loop import learning_rate

NUM_STEPS = 110
WARMUP = 10


def make_config(schedule, floor=0.0, warmup=WARMUP):
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "data"},
            "global_batch_size": 1,
            "learning_rate": 2.0,
            "schedule": schedule,
            "warmup_steps": warmup,
            "min_learning_rate_fraction": floor,
        }
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_starts_above_zero(schedule):
    rates = [learning_rate(make_config(schedule), step, NUM_STEPS) for step in range(1, WARMUP + 2)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rates_are_those_of_transformers_whose_warm_up_is_a_step_behind(schedule):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=WARMUP, num_training_steps=NUM_STEPS)
    expected = []
    for _ in range(NUM_STEPS):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    rates = [learning_rate(make_config(schedule), step, NUM_STEPS) for step in range(1, NUM_STEPS + 1)]
    assert rates[WARMUP:] == pytest.approx(expected[WARMUP:])
    assert rates[: WARMUP - 1] == pytest.approx(expected[1:WARMUP])
    assert expected[0] == 0


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 1.0), ("linear", 1.0), ("constant", 2.0)])
def test_half_way_after_warm_up_half_of_the_rate_is_left(schedule, middle):
    assert learning_rate(make_config(schedule), WARMUP + 51, NUM_STEPS) == pytest.approx(middle)


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0.5), ("linear", 0.5), ("constant", 2.0)])
def test_the_step_after_the_last_would_reach_the_floor(schedule, end):
    assert learning_rate(make_config(schedule, floor=0.25), NUM_STEPS + 1, NUM_STEPS) == pytest.approx(end)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rates_fall_and_stay_positive_after_warm_up(schedule):
    rates = [learning_rate(make_config(schedule), step, NUM_STEPS) for step in range(WARMUP + 1, NUM_STEPS + 1)]
    assert all(earlier > later > 0 for earlier, later in pairwise(rates))


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(make_config("cosine", warmup=0), 1, NUM_STEPS) == 2.0
