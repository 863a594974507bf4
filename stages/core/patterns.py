"""Matching of untrusted regular expressions (from a recipe or an adapter) in a process with time and memory limits."""

import functools
from collections.abc import Sequence
from typing import Literal, Self

from stages.core.program import Program, ProgramError

LIMIT_S = 2.0
"""Limit of CPU seconds for matching one regular expression; some take time that is exponential in the text's length."""
GRACE_S = 2.0
NAMES = (
    "model.layers.31.self_attn.q_proj",
    "model.layers.31.mlp.experts.127.down_proj",
    "model.language_model.layers.31.linear_attn.in_proj_qkvz",
    "lm_head",
)
"""Names of typical model modules, on which a recipe's regular expressions are tried before training."""


class PatternError(ValueError):
    """Raised for a text that is not a valid regular expression."""


class Patterns:
    """Client of the process that matches regular expressions, which ends with the `with` block."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._program = Program("stages.core.pattern_program", str(limit_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()

    def start(self) -> None:
        """Start the process that matches regular expressions before it is needed, to save time later."""
        self._program.start()

    def first_matches(
        self, patterns: Sequence[str], texts: Sequence[str], how: Literal["search", "match", "re.fullmatch"]
    ) -> list[int | None]:
        """Return, for each text, the index of the first pattern that matches it; None if none does.

        Raises PatternError, and TimeoutError where all of this takes over the limit, or too much memory.
        """
        question = {"patterns": patterns, "texts": texts, "how": how}
        try:
            # The process ends the work itself at its own limit; the grace is for what it cannot interrupt.
            found: list[int | None] = self._program.ask_hostile(question, self._limit_s + GRACE_S)
        except ProgramError as error:
            raise PatternError(str(error)) from error
        return found


@functools.cache
def pattern_problem(pattern: str) -> str | None:
    """Return why a text cannot be used as a regular expression; None if it can."""
    with Patterns(LIMIT_S) as patterns:
        try:
            patterns.first_matches([pattern], [""], "search")
        except PatternError as error:
            return f"is no regular expression: {error}"
        except TimeoutError:
            return f"takes over {LIMIT_S:g} s, or too much memory, to be read as a regular expression"
    return None


@functools.cache
def is_endless_on_names(pattern: str) -> bool:
    """Return whether Python's `re` takes too long to match a pattern with typical module names, as PEFT will do."""
    with Patterns(LIMIT_S) as patterns:
        try:
            patterns.first_matches([pattern], NAMES, "re.fullmatch")
        except TimeoutError:
            return True
    return False
