"""Compares answers of models with right ones: `python -m stages.rewards.math_program`.

A line of JSON on the standard input has `text` and `reference`; its answer, {"found": WORD}, is one on the standard
output: `right`, `wrong` or `no answer`. The first answer says that the library is there. Some comparisons never end, or
take any amount of memory: who asks ends this process then, and the memory has a limit.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
WORDS = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")


def reference_in(text: str) -> list[Any]:
    """What a right answer may be read as; empty for one that is no mathematics.

    The library looks for formulas between marks, and for numbers elsewhere: an answer that is a bare formula is marked.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit of its own is set
    bare = not MARKED.search(text) and not WORDS.search(text)
    return list(parse(f"${text}$" if bare else text, parsing_timeout=None))


def compared(text: str, reference: str) -> str:
    """`right`, `wrong` or `no answer`."""
    from math_verify import parse, verify

    found = parse(text, parsing_timeout=None)
    if not found:
        return "no answer"
    return "right" if verify(reference_in(reference), found, timeout_seconds=None) else "wrong"


def main() -> None:
    """Answers until the standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()
    compared("$1$", "1")
    print(json.dumps({"found": "right"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"found": compared(asked["text"], asked["reference"])}), flush=True)


if __name__ == "__main__":
    main()
