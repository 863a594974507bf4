"""A round's prompts depend on seed and step alone; a saved round is read back exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.kinds.train.methods.grpo import GrpoConfig
from stages.kinds.train.rollouts.rounds import Completion, Group, Round, RoundPlan


def plan(num_prompts: int = 20, seed: int = 0, **options: object) -> RoundPlan:
    return RoundPlan(num_prompts, 6, GrpoConfig.model_validate(options), seed)


def test_an_epoch_asks_every_prompt_once_and_a_resumed_run_the_same_again() -> None:
    one = plan(num_prompts=18, steps_per_generation=2, num_iterations=3)
    assert one.steps_per_round == 6
    rounds = [one.prompts(first_step) for first_step in (1, 7, 13)]
    assert sorted(prompt for asked in rounds for prompt in asked) == list(range(18))
    assert plan(num_prompts=18, steps_per_generation=2, num_iterations=3).prompts(7) == rounds[1]
    assert plan(num_prompts=18, seed=1, steps_per_generation=2, num_iterations=3).prompts(7) != rounds[1]


def test_the_steps_of_a_round_learn_from_its_parts_in_turn() -> None:
    one = plan(steps_per_generation=2, num_iterations=2)
    assert [one.part(step) for step in range(1, 9)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [one.staleness(step) for step in range(1, 9)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_prompts_that_are_drawn_again_are_others_with_seeds_of_their_own() -> None:
    one = plan()
    assert one.others(1, 1, 3) == one.others(1, 1, 3)
    assert len({tuple(one.others(step, draw, 4)) for step in (1, 2) for draw in (1, 2)}) == 4
    assert len(one.others(1, 1, 30)) == 30, "more than there are prompts"
    seeds = [one.request_seed(step, draw, place) for step in (1, 2) for draw in (0, 1) for place in range(6)]
    assert len(set(seeds)) == len(seeds)


def test_a_round_comes_back_from_its_file(tmp_path: Path) -> None:
    same = Completion([5, 2], [-0.5, -1e-7], "7", False, {"right": 0.0}, 0.0)
    better = Completion([6], [-3.25], "8\n", True, {"right": 1.0}, 1.0)
    found = Round(7, [Group(3, [same, same]), Group(1, [same, better])], {"generate_s": 0.5})
    found.write(tmp_path / "rollouts" / "step-7.json")
    assert Round.read(tmp_path / "rollouts" / "step-7.json") == found
    assert [group.has_signal for group in found.groups] == [False, True]
    assert found.completions == [same, same, same, better]


@pytest.mark.parametrize("count", [1, 6])
def test_no_prompt_is_drawn_twice_at_once_while_there_are_others(count: int) -> None:
    assert len(set(plan().others(3, 1, count))) == count
