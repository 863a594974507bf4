"""Program that checks texts against a JSON Schema: `python -m stages.rewards.json_schema_program CPU_SECONDS`.

A question has `schema` and `text`. Patterns, references to itself, and long lists of unique items may take any time.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from stages.core.program_loop import answer_questions

MEMORY_BYTES = 2 << 30


def begin() -> Callable[[dict[str, Any]], bool]:
    """Import the JSON Schema library, and return the function that checks a text against a schema."""
    from jsonschema.validators import validator_for

    def is_described(question: dict[str, Any]) -> bool:
        try:
            content = json.loads(question["text"])
        except (ValueError, RecursionError):
            return False
        validator: Any = validator_for(question["schema"])
        try:
            return bool(validator(question["schema"]).is_valid(content))
        except (OverflowError, ValueError):  # `multipleOf` of 1e400 or of NaN, which JSON does not have
            return False

    return is_described


if __name__ == "__main__":
    answer_questions(begin, memory_bytes=MEMORY_BYTES, cpu_s=float(sys.argv[1]))
