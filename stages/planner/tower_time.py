"""Predicted time of the towers of a model, by the patches of its rows' pictures and sounds (`stages.models.tower`)."""

from __future__ import annotations

import math

from stages.models.tower import Tower
from stages.planner.compute import PassTimes, memory_rate
from stages.planner.costs import TimedCase
from stages.planner.kernels import layer_kernels
from stages.planner.workload import RowMedia


def tower_time(case: TimedCase) -> PassTimes:
    """Return the seconds of a micro-batch's media on one process rank; recomputation counts as backward.

    Products run at the full matmul rate. What a layer keeps for its backward pass is written and read once on the way,
    and the host launches as many kernels as for a layer of text: two assumptions.
    """
    by_tower = (_time(case, tower, media) for tower, media in case.workload.media_by_tower(case.shape))
    return sum(by_tower, PassTimes(0.0, 0.0))


def _time(case: TimedCase, tower: Tower, media: RowMedia) -> PassTimes:
    workload, hardware = case.workload, case.hardware
    patches = media.of_row(tower) * case.layout.micro_batch_size
    learns = workload.learns(tower.part)
    flops = tower.flops(tower_learns=learns, projector_learns=workload.learns("projector"))
    rate = hardware.sustained_flops_per_s("fp32" if workload.precision == "fp32" else "bf16")
    rate *= hardware.efficiency.matmul
    products = PassTimes(flops.forward(patches) / rate, (flops.training(patches) - flops.forward(patches)) / rate)
    moved_s = 2 * sum(patches) * tower.kept(workload.compute_bytes).layers / memory_rate(hardware)
    host_s = tower.num_layers * layer_kernels(case) * hardware.efficiency.launch_s
    forward_s = products.forward_s + moved_s
    backward_s = products.backward_s + 2 * moved_s * learns
    if learns and case.layout.recomputes:
        backward_s += forward_s if case.layout.recompute == "full" else moved_s
    if hardware.host_is_device:
        return PassTimes(forward_s + host_s, backward_s + 2 * host_s * learns)
    return PassTimes(math.hypot(forward_s, host_s), math.hypot(backward_s, 2 * host_s * learns))
