"""Pipeline waiting time is the time in which a process neither computes nor reduces gradients."""

import time

import torch

from stages.engines.megatron.clock import PipelineClock


def spend(clock, name, seconds):
    clock(name, log_level=2).start()
    time.sleep(seconds)
    clock(name).stop()


def test_what_is_neither_work_nor_reduction_is_waiting():
    clock = PipelineClock(torch.device("cpu"))
    clock("forward-backward", log_level=1).start(barrier=True)
    spend(clock, "forward-compute", 0.02)
    time.sleep(0.05)
    spend(clock, "backward-compute", 0.02)
    spend(clock, "all-grads-sync", 0.03)
    clock("forward-backward").stop()
    passed_s, waited_s = clock.take()
    assert 0.05 <= waited_s <= passed_s - 0.04
    assert passed_s >= 0.09


def test_a_reading_starts_again():
    clock = PipelineClock(torch.device("cpu"))
    spend(clock, "forward-backward", 0.01)
    clock.take()
    assert clock.take() == (0.0, 0.0)
