"""The worker's part of the retention policy: applied each day in a process of its own, so that what this imports goes.

What was removed, or could not be, is in the worker's log.
"""

from __future__ import annotations

import os
import sys
import time

from flows.store.policy import policy_file
from stages.core.supervised import Supervised

POLL_INTERVAL_S = 1.0


def apply_retention() -> None:
    """Remove what the policy of this home does not keep; nothing without a policy."""
    if not policy_file().exists():
        return
    print(f"applying {policy_file()}", flush=True)
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "gc", "--policy"]
    program = Supervised(command, environment=os.environ, output=sys.stdout.buffer)
    try:
        while program.poll() is None:
            time.sleep(POLL_INTERVAL_S)
    finally:
        program.stop()
