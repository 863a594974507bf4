"""Options of `sglang serve` that a recipe passes through: those that tune, and no others.

Of its 532 options many load weights that are no safetensors, run code of others, name files that no version knows, or
open doors past the proxy. So, other than vLLM's, those that are passed are listed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from stages.core.errors import RecipeError

CHECK = Path(__file__).with_name("option_check.py")
PASSED = (
    *("attention-backend", "sampling-backend", "grammar-backend", "quantization", "kv-cache-dtype", "page-size"),
    *("mem-fraction-static", "max-total-tokens", "max-prefill-tokens", "chunked-prefill-size", "enable-mixed-chunk"),
    *("schedule-policy", "schedule-conservativeness", "num-continuous-decode-steps", "disable-overlap-schedule"),
    *("disable-radix-cache", "radix-eviction-policy", "enable-deterministic-inference", "enable-fp32-lm-head"),
    *("cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill", "enable-torch-compile", "disable-custom-all-reduce"),
    *("dp-size", "ep-size", "pp-size", "random-seed", "watchdog-timeout", "reasoning-parser", "tool-call-parser"),
    *("speculative-algorithm", "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"),
    *("speculative-ngram-max-trie-depth", "speculative-ngram-capacity"),
)
"""As SGLang 0.5.23 has them."""


def refusals(arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    """`OPTION: why`, of those that are passed to no server."""
    for name, value in arguments.items():
        if name not in PASSED:
            close = difflib.get_close_matches(name, PASSED, n=2)
            meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(PASSED)}"
            yield f"{name}: no option that is passed on to SGLang; {meant}"
        elif value is None or value is False:
            yield f"{name}: found {json.dumps(value)}; leave the option out, or say true for one without a value"


def written(arguments: Mapping[str, JsonValue]) -> dict[str, list[str]]:
    """Option → how the command line has it. Raises RecipeError for one that is refused."""
    if refused := list(refusals(arguments)):
        raise RecipeError(f"the arguments of SGLang: {'; '.join(refused)}")
    return {
        name: [f"--{name}"] if value is True else [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]
        for name, value in arguments.items()
    }
