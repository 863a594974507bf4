"""1 where the answer in the completion is mathematically that of the reference, else 0 or less."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.core.numbers import Seconds
from stages.rewards.programs import Program, ProgramEndedError
from stages.rewards.reward import Completion, CompletionReward, RewardContext, Scores

START_TIMEOUT_S = 300.0


class MathReward(CompletionReward):
    r"""1 where the completion's answer (in `\boxed{}`, in LaTeX, or a number) equals the reference's in value, such as
    `\frac{1}{2}` and 0.5; 0 where it does not, `no_answer` where there is none to be found.
    """

    NEEDS_REFERENCE: ClassVar[bool] = True

    type: Literal["math"]
    no_answer: float = Field(-1.0, lt=1, allow_inf_nan=False, description="For a completion without an answer.")
    timeout_s: Seconds = Field(5.0, description="Of one comparison; one that takes longer counts as wrong.")

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        if reference is None or importlib.import_module("stages.rewards.math_program").reference_in(reference):
            return None
        return f"has the right answer {reference[:60]!r}, which is no number and no formula"

    def score(self, completion: Completion) -> float:
        with Program("stages.rewards.math_program") as program:
            program.answer(START_TIMEOUT_S)
            return self._value(self._found(program, completion))

    @contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        programs = [_started()]

        def scores(completions: Sequence[Completion]) -> Iterator[float]:
            counted: Counter[str] = Counter()
            for completion in completions:
                found = self._found(programs[0], completion)
                if found == "timeout":
                    programs[0].close()
                    programs[0] = _started()
                counted[found] += 1
                yield self._value(found)
            if counted["timeout"]:
                context.warn(
                    f"the reward {name}: {counted['timeout']} of {counted.total()} comparisons took over "
                    f"{self.timeout_s:g} s, or all memory that they may have; they count as wrong"
                )

        try:
            yield scores
        finally:
            programs[0].close()

    def _found(self, program: Program, completion: Completion) -> str:
        """`right`, `wrong`, `no answer` or `timeout`."""
        try:
            asked = {"text": completion.text, "reference": completion.reference}
            return str(program.ask(asked, self.timeout_s)["found"])
        except (TimeoutError, ProgramEndedError):
            return "timeout"

    def _value(self, found: str) -> float:
        return {"right": 1.0, "no answer": self.no_answer}.get(found, 0.0)


def _started() -> Program:
    program = Program("stages.rewards.math_program")
    try:
        program.answer(START_TIMEOUT_S)
    except BaseException:
        program.close()
        raise
    return program
