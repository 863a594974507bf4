"""Program that measures the layers of models, each in a process of its own, within limits of memory and time.

python -m stages.models.walk_program   # for each line of standard input that `answer` takes, a line of what it returns

The processes are forked from this one, which has imported Transformers: that takes ten times as long as a walk. It ends
at the first that fails.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from stages.core.process_tree import die_with_parent
from stages.models.start_up import hide_unused_packages

MEMORY_BYTES, CPU_S = 4 * 2**30, 100
"""Memory beyond that of the libraries, and processor time, that a walk may take."""


def main() -> None:
    """Answer about the models on standard input."""
    hide_unused_packages()
    from stages.models.walk_answer import answer  # and what Transformers builds models with

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            die_with_parent()
            _limit()
            answers, sys.stdout = sys.stdout, sys.stderr  # where Transformers may print
            print(json.dumps(answer(line)), file=answers, flush=True)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(signal.Signals(-code).name if code < 0 else code)


def _limit() -> None:
    """Limit the memory and processor time of this process."""
    num_pages = int(Path("/proc/self/statm").read_text().split(maxsplit=1)[0])
    limits = {
        resource.RLIMIT_AS: num_pages * resource.getpagesize() + MEMORY_BYTES,
        resource.RLIMIT_CPU: int(time.process_time()) + CPU_S,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
