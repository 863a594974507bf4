"""What the processes that build models leave out of their start."""

import subprocess
import sys

PROGRAM = """
import sys
from importlib.util import find_spec
from stages.models.start_up import hide_unused_packages
hide_unused_packages()
import transformers.models.qwen3.modeling_qwen3
print(*(name for name in ("sklearn", "scipy") if name in sys.modules))
assert find_spec("sklearn") and find_spec("scipy")
"""


def test_models_do_without_packages_that_everybody_else_still_finds():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
