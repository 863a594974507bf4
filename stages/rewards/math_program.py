"""Program that compares a model's answers with right ones: `python -m stages.rewards.math_program CPU_SECONDS`.

A question has `text` and `reference`; the answer is `right`, `wrong` or `no answer`. Without a text: whether the
reference is mathematics. Some formulas never end, or take any amount of memory.
"""

import logging
import re
import sys
from collections.abc import Callable
from typing import Any

from stages.core.program_loop import answer_questions

MEMORY_BYTES = 4 << 30
MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
WORDS = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")


def begin() -> Callable[[dict[str, str]], str | bool]:
    """Import the math library, which takes a second, and return the function that compares answers."""
    logging.disable()
    # The first comparison loads what the library imports late, before any answer's time is measured.
    compared("$1$", "1")

    def answered(question: dict[str, str]) -> str | bool:
        is_comparison = "text" in question
        try:
            return compared(**question) if is_comparison else bool(reference_in(question["reference"]))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # SymPy raises errors of many kinds for formulas that it cannot compute
            return "wrong" if is_comparison else False

    return answered


def reference_in(text: str) -> list[Any]:
    """Return all values of a reference answer, or []; a bare formula is put between the library's marks."""
    from math_verify import parse

    bare = not MARKED.search(text) and not WORDS.search(text)
    return list(parse(f"${text}$" if bare else text, parsing_timeout=None))


def compared(text: str, reference: str) -> str:
    """Compare a model's answer with the right one; return `right`, `wrong` or `no answer`."""
    from math_verify import parse, verify

    answers = parse(text, parsing_timeout=None)
    if not answers:
        return "no answer"
    return "right" if verify(reference_in(reference), answers, timeout_seconds=None) else "wrong"


if __name__ == "__main__":
    answer_questions(begin, memory_bytes=MEMORY_BYTES, cpu_s=float(sys.argv[1]))
