"""Accelerator for the GPU tests, or the CPU with `TESTS_GPU_ON=cpu`, on which they prove only the tests themselves."""

import importlib.util
import os

import pytest
import torch

ON_CPU = os.environ.get("TESTS_GPU_ON") == "cpu"
DEVICE = torch.device("cpu") if ON_CPU else torch.accelerator.current_accelerator(check_available=True)
NUM_DEVICES = 0 if ON_CPU else torch.accelerator.device_count()

needs_device = pytest.mark.skipif(DEVICE is None, reason="torch finds no accelerator here")
needs_two = pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs two accelerators, torch finds {NUM_DEVICES}")
HAS_EIGHT_BITS = (
    DEVICE is not None
    and DEVICE.type == "cuda"
    and torch.version.hip is None
    and torch.cuda.get_device_capability() >= (8, 9)
    and importlib.util.find_spec("torchao") is not None
)
needs_eight_bits = pytest.mark.skipif(
    not HAS_EIGHT_BITS, reason="needs torchao and an NVIDIA GPU of compute capability 8.9 or later"
)
