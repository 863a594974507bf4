"""torchvision, by which images are prepared, is there in both environments, whatever their torch was built for."""

import subprocess
import sys
from pathlib import Path

import pytest

from stages.serving.vllm.engine import find_vllm

PROGRAM = """
import torch
from torchvision.transforms.v2 import functional
print(list(functional.resize(torch.zeros(3, 4, 4, dtype=torch.uint8), [2, 2]).shape))
"""


@pytest.mark.parametrize("python", [Path(sys.executable), find_vllm().python], ids=["pipeline", "serve"])
def test_an_image_is_resized(python: Path) -> None:
    done = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[3, 2, 2]\n", 0), done.stderr
