"""Finds in SGLang's log why the server did not start, and what to change where that is known."""

from __future__ import annotations

import re

from stages.serving.tracebacks import root_cause

PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s?(?:Scheduler hit an exception: )?")
"""Such as `[2026-11-23 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):`."""
USAGE = re.compile(r"^(?:sglang serve|server_program\.py): error: (.+)")
GENERIC = ("died during initialization", "cancellederror", "systemexit", "keyboardinterrupt")
CURES = {
    "Not enough memory. Please try to increase --mem-fraction-static": (
        "the weights leave no room for keys and values; raise serving.arguments.mem-fraction-static, or share the "
        "layers by serving.tensor_parallel_size"
    ),
    "out of memory": (
        "lower serving.arguments.mem-fraction-static or serving.max_num_seqs, or share the layers by "
        "serving.tensor_parallel_size"
    ),
}
"""What the cause says → what to change."""


def find_root_cause(log: str) -> str | None:
    """The first exception that is not a mere consequence of another, with its message and cure; None without one."""
    return root_cause(log, prefix=PREFIX, usage=USAGE, generic=GENERIC, cures=CURES)
