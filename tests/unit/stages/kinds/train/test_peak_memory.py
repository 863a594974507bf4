"""The peak memory that a training reports excludes the loading of the model."""

import os

import pytest
import torch

from stages.kinds.train.metrics import forget_peak_memory, peak_memory
from stages.parallel.processes import joined_processes

CPU = torch.device("cpu")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel forgets no peaks")
def test_what_was_held_before_is_forgotten_and_what_comes_is_counted():
    with joined_processes():
        check()


def check():
    torch.ones(2**27)  # half a GiB
    before = peak_memory(CPU, every_rank=False)["peak_memory_gib"]
    forget_peak_memory(CPU)
    after = peak_memory(CPU, every_rank=False)["peak_memory_gib"]
    assert after < before - 0.4
    torch.ones(2**26)
    assert peak_memory(CPU, every_rank=False)["peak_memory_gib"] > after + 0.2
