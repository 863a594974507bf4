"""Finds in LMDeploy's log why the server did not start, and what to change where that is known."""

from __future__ import annotations

import re

from stages.serving.tracebacks import root_cause

PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \w+ - (?:ERROR|CRITICAL) - \S+ - ")
"""Such as `2026-11-24 10:00:00,123 - lmdeploy - ERROR - base.py:45 - RuntimeError: no GPU`."""
USAGE = re.compile(r"^server_program\.py\b.*?: error: (.+)")
GENERIC = ("cancellederror", "systemexit", "keyboardinterrupt", "worker failed", "engine loop failed")
CURES = {
    "out of memory": (
        "lower serving.arguments.cache-max-entry-count or serving.max_num_seqs, or share the layers by "
        "serving.tensor_parallel_size"
    ),
    "ompressed-tensors": "LMDeploy reads int4 weights only, of few group sizes; serve this model with `engine: vllm`",
}
"""What the cause says → what to change."""


def find_root_cause(log: str) -> str | None:
    """The first exception that is not a mere consequence of another, with its message and cure; None without one."""
    return root_cause(log, prefix=PREFIX, usage=USAGE, generic=GENERIC, cures=CURES)
