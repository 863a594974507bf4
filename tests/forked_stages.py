"""Fast start of stage processes in tests: they are forked from a parent that has made their slow imports."""

import json
import os
import sys
from contextlib import ExitStack
from functools import cache

from stages.__main__ import main as run_stage
from tests.parity.ranks import Ranks, started_ranks

PARENTS = ExitStack()


@cache
def warm_parent(program: str) -> Ranks:
    """Return the parent process from which a program's stage processes are forked; one parent for each program."""
    return PARENTS.enter_context(started_ranks())


def main() -> None:
    """Run a stage in a fork. Arguments: the stage's work folder, and its environment as a JSON object."""
    os.environ |= json.loads(sys.argv[2])
    sys.argv = sys.argv[:2]
    run_stage()
