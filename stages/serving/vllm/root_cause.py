"""Finds in vLLM's log why the server did not start.

The last line is of no help (`RuntimeError: Engine core initialization failed. See root cause above`): several processes
write into one log, each prefixes its lines, and the first traceback is the one that says what happened.
"""

from __future__ import annotations

import re

from stages.serving.tracebacks import root_cause

PREFIX = re.compile(r"^(?:\(\w+[^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?)?")
"""The process, then the level, the time and the module."""
USAGE = re.compile(r"^(?:vllm|vllm serve|api_server\.py)\S*: error: (.+)")
GENERIC = (
    "engine core initialization failed",
    "enginecore encountered an issue",
    "see root cause above",
    "see stack trace for root cause",
    "cancellederror",
    "systemexit",
    "keyboardinterrupt",
)


def find_root_cause(log: str) -> str | None:
    """The first exception in `log` that is not a mere consequence of another, with its message; None without one."""
    return root_cause(log, prefix=PREFIX, usage=USAGE, generic=GENERIC)
