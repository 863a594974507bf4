"""Stage processes forked from parents that have imported what they need, which takes longer than most stages here."""

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
    """Return a process, cached for this one's lifetime, from which ranks of a program are forked."""
    return PARENTS.enter_context(started_ranks())


def main() -> None:
    """Run a stage as a rank program (`tests/parity/ranks.py`): `[WORK, ENVIRONMENT]`.

    ENVIRONMENT: a JSON object of the variables that a process of the stage has.
    """
    os.environ |= json.loads(sys.argv[2])
    sys.argv = sys.argv[:2]
    run_stage()
