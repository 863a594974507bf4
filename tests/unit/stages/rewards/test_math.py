"""Math answers are compared by value; unreadable and never-ending ones are distinguished from wrong ones."""

import time
from pathlib import Path

import pytest

from stages.core.errors import DataError
from stages.data.messages import PlainText
from stages.rewards.math import MathReward
from stages.rewards.reward import Completion, RewardContext

RIGHT = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5"),
    ("The answer is $0.5$.", r"\frac{1}{2}"),
    ("We get 1/2", r"$\frac12$"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"$x = 3$", "3"),
    (r"$(x+1)^2$", "x^2+2x+1"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    ("that makes 1,234 apples", "#### 1234"),
    (r"\[ (1, 2] \]", r"\left(1,2\right]"),
    (r"\boxed{50\%}", "0.5"),
]
WRONG = [("3, or rather 4", "3"), (r"\boxed{\frac{1}{3}}", "0.5"), ("$x^2+2x$", "x^2+2x+1"), (r"\boxed{}, so 5", "6")]
NONE = [("I do not know.", "3"), ("", "3"), ("Three!", "3")]
ENDLESS = "$9^{9^{9^{9}}} + 1$"
ENDLESS_TO_READ = r"$\binom{1000000000}{500000000}$"


@pytest.fixture(scope="module")
def scored() -> dict[tuple[str, str], float]:
    """Provide the math reward's score of every answer in these tests, one of which needs an endless comparison."""
    asked = [*RIGHT, (ENDLESS, "1"), *WRONG, *NONE]
    warnings: list[str] = []
    completions = [Completion("", text, 1, reference, {}, PlainText("", "")) for text, reference in asked]
    reward = MathReward(type="math", timeout_s=8, no_answer=-0.5)
    began_s = time.monotonic()
    with reward.opened("right", RewardContext({}, Path("/nowhere"), warnings.append)) as scores:
        found = dict(zip(asked, scores(completions), strict=True))
    assert time.monotonic() - began_s < 300
    assert len(warnings) == 1
    assert "the reward right: 1 of 18 comparisons took over 8 s" in warnings[0]
    return found


@pytest.mark.parametrize("asked", RIGHT)
def test_the_same_value_however_written(scored: dict[tuple[str, str], float], asked: tuple[str, str]) -> None:
    assert scored[asked] == 1


def test_another_value_and_no_answer_are_told_apart(scored: dict[tuple[str, str], float]) -> None:
    assert [scored[asked] for asked in WRONG] == [0] * len(WRONG)
    assert [scored[asked] for asked in NONE] == [-0.5] * len(NONE)
    assert scored[ENDLESS, "1"] == 0


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("3", None),
        (r"\frac{1}{2}", None),
        ("x^2", None),
        ("no one knows", "has the right answer 'no one"),
    ],
)
def test_a_right_answer_that_is_no_mathematics_is_found_before_anything_is_asked(
    reference: str, expected: str | None
) -> None:
    found = MathReward(type="math").row_problem(reference, {})
    assert found is None if expected is None else found.startswith(expected)


@pytest.mark.parametrize("reference", [ENDLESS_TO_READ, r"\binom{999999999}{499999999} + 1"])
def test_a_right_answer_that_takes_for_ever_is_a_problem_of_its_row(reference: str) -> None:
    began_s = time.monotonic()
    problem = MathReward(type="math", timeout_s=0.5).row_problem(reference, {})
    assert problem
    assert "cannot be read within 0.5 s" in problem
    assert time.monotonic() - began_s < 60


def test_rows_that_take_for_ever_are_not_all_waited_for() -> None:
    with MathReward(type="math", timeout_s=0.01).row_checks() as check:
        found = [check(ENDLESS_TO_READ, {}) for _ in range(5)]
        assert all(found)
        with pytest.raises(DataError, match=r"6 rows have right answers .* cannot read within timeout_s, 0.01 s"):
            check(ENDLESS_TO_READ, {})
