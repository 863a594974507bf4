"""Process that matches untrusted regular expressions: `python -m stages.core.pattern_program CPU_SECONDS`.

Most that are exponential in `re` take `regex` no time; `re` is used where a library will do so later. Expression and
search may take any time, the expression alone any memory (`(?:(?:a{1000}){1000}){1000}`).
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from stages.core.program_loop import RefusedError, answer_questions

MEMORY_BYTES = 1 << 30


def begin(cpu_s: float) -> Callable[[dict[str, Any]], list[int | None]]:
    """Import the regular-expression library and return the function that matches texts with patterns.

    For each of a request's `texts` it returns the index of the first of `patterns`, compared by `how`, that matches.
    """
    import regex

    compiled = functools.lru_cache(regex.compile)

    def compared(pattern: str, how: str) -> Callable[[str], object]:
        if how == "re.fullmatch":
            return re.compile(pattern).fullmatch
        # The library's own time limit, since it checks for signals only rarely.
        return functools.partial(getattr(compiled(pattern), how), timeout=cpu_s)

    def first_matches(question: dict[str, Any]) -> list[int | None]:
        try:
            tries = [compared(pattern, question["how"]) for pattern in question["patterns"]]
        except regex.error as error:
            raise RefusedError(str(error)) from error
        return [next((number for number, tried in enumerate(tries) if tried(text)), None) for text in question["texts"]]

    return first_matches


if __name__ == "__main__":
    limit_s = float(sys.argv[1])
    answer_questions(lambda: begin(limit_s), memory_bytes=MEMORY_BYTES, cpu_s=limit_s)
