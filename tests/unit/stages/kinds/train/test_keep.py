"""`keep: best` keeps the best checkpoint: which fields it requires, and its effect on the artifact version."""

import pytest
from pydantic import ValidationError

from tests.train_stage import make_config

EVERY_10_STEPS = {"evaluate_every_steps": 10}


def test_the_best_of_which_steps_is_part_of_the_identity_and_only_then() -> None:
    plain = make_config(execution=EVERY_10_STEPS).identity()
    best = make_config(execution=EVERY_10_STEPS, keep="best").identity()

    assert plain == make_config().identity()
    assert best == {**plain, "keep": "best", "evaluate_every_steps": 10}


@pytest.mark.parametrize("fields", [{}, {"execution": EVERY_10_STEPS, "data": {"dataset": "problems"}}])
def test_one_step_or_no_held_out_rows_leave_nothing_to_choose(fields) -> None:
    with pytest.raises(ValidationError, match="chooses by the held-out loss of several steps"):
        make_config(keep="best", **fields)
