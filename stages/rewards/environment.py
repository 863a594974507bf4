"""What a process that runs code of others has of this one's environment: no keys, no tokens."""

from __future__ import annotations

import os
from pathlib import Path

import stages

PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS")


def bare_environment(home: Path) -> dict[str, str]:
    """Where programs, libraries and our own code are found, the locale, and an empty home."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ours = str(Path(next(iter(stages.__path__))).parent)
    python_path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    return {**passed_on, "PYTHONPATH": python_path, "HOME": str(home), "TMPDIR": str(home)}
