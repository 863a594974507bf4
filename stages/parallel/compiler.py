"""C compiler that torch.compile needs on the machine that trains: for Triton's launchers, or for a CPU's kernels."""

import os
import shutil
import sysconfig
from pathlib import Path

REMEDY = "install it (Debian: `apt-get install g++ python3-dev`), or say `compile: false`"


def missing_compiler(on_gpu: bool) -> str | None:
    """Return what `layout.compile` lacks on this machine, a compiler or Python's headers, and a remedy; or None."""
    # Triton calls a C compiler, Inductor's kernels for CPUs are C++.
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    given = os.environ.get(variable)
    if not any(map(shutil.which, (given,) if given else names)):
        found = f"{variable} is {given!r}, which is no program" if given else "there is none"
        return f"`layout.compile` needs {' or '.join(names)} on this machine, and {found}; {REMEDY}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        where = sysconfig.get_path("include")
        return f"`layout.compile` needs Python's headers, and {where} has no Python.h; {REMEDY}"
    return None
