"""Reward by mathematical equality: 1 where the answer in a completion has the value of the reference answer, else 0."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.core.errors import DataError
from stages.core.fields import Seconds
from stages.core.program import Program
from stages.core.redaction import quoted
from stages.rewards.reward import AskingReward, Completion, RowCheck

GRACE_S = 1.0
"""Seconds beyond the math program's own time limit before it is killed, for a step that it cannot interrupt."""
MAX_ENDLESS_ROWS = 5
"""Largest number of dataset rows whose right answer may take the whole time limit before the check stops."""


class MathReward(AskingReward):
    r"""Reward of 1 where the completion's answer (in `\boxed{}`, LaTeX, or a number) has the reference's value, else 0.

    `\frac{1}{2}` equals 0.5; `no_answer` where the completion has no answer.
    """

    NEEDS_REFERENCE: ClassVar[bool] = True

    type: Literal["math"]
    no_answer: float = Field(-1.0, lt=1, allow_inf_nan=False, description="Reward of a completion that has no answer.")
    timeout_s: Seconds = Field(
        5.0, description="Time limit of comparing one answer, in seconds; beyond it the answer counts as wrong."
    )

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        with self.row_checks() as check:
            return check(reference, row)

    @contextmanager
    def row_checks(self) -> Iterator[RowCheck]:
        """Yield a function that checks whether a row's right answer is a number or formula.

        It raises DataError at the row after `MAX_ENDLESS_ROWS` that cannot be read in time.
        """
        num_endless = 0

        def check(reference: str | None, row: Mapping[str, Any]) -> str | None:
            nonlocal num_endless
            if reference is None:
                return None
            answer = f"has the right answer {quoted(reference, 60)}, which"
            try:
                is_mathematics = self._answer(program, reference=reference)
            except TimeoutError:
                num_endless += 1
                if num_endless > MAX_ENDLESS_ROWS:
                    raise DataError(
                        f"{num_endless} rows have right answers that the reward `math` cannot read within timeout_s, "
                        f"{self.timeout_s:g} s, or within its memory, such as {quoted(reference, 60)}; write their "
                        "values, or leave these rows out"
                    ) from None
                return f"{answer} cannot be read within {self.timeout_s:g} s, or within the memory that it may have"
            return None if is_mathematics else f"{answer} is no number and no formula"

        with self.program() as program:
            yield check

    @property
    def limit_s(self) -> float:
        return self.timeout_s

    def program(self) -> Program:
        return Program("stages.rewards.math_program", str(self.timeout_s))

    def asked(self, program: Program, completion: Completion) -> float:
        outcome = self._answer(program, text=completion.text, reference=completion.reference)
        return {"right": 1.0, "no answer": self.no_answer}.get(outcome, 0.0)

    def _answer(self, program: Program, **question: str | None) -> Any:
        """Ask the math program to compare a completion, or to parse a right answer; raise TimeoutError."""
        return program.ask_hostile(question, self.timeout_s + GRACE_S)
