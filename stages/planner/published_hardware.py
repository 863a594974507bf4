"""The cluster of a published run, by what its row's `gpu` cell says: `H100-96GB HBM2e, 2.4 TB/s, 500 W`. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from stages.planner.devices import HARDWARE
from stages.planner.hardware import Hardware
from stages.planner.published_cells import Cells, UnknownRunError

NETWORKS_GB_PER_S = {"jean zay": 6.25, "p4d": 6.25, "efa": 6.25}
"""Clusters that a GPU's description names, with one device's share of the network (Jean Zay: 4 × 100 Gb/s a node)."""
RATED_W = {"h100-80gb": 700, "h200": 700}
"""Of boards that are run with less, too: a GPU's description may say so."""
RATE_BY_POWER = 0.58
"""Exponent: what one chip sustains, by its power. MI300X and MI325X, MI350X and MI355X have it so (`devices`)."""
USABLE_MEMORY = 0.99
"""GiB that programs find of each GB of a GPU's name."""
OTHER_SIZE = 0.1
"""Share by which a size in a GPU's name is another one than is known of this GPU."""


def hardware_of_run(cells: Cells) -> Hardware:
    """A known device, with what its description says of it: network, bandwidth of the memory, power, size. Raises
    UnknownRunError for others."""
    text = cells.text("gpu").lower()
    words = re.sub(r"[^a-z0-9]+", " ", text or "a100").split()
    matches = [name for name in HARDWARE if set(re.sub(r"-\d+gb$", "", name).split("-")) <= set(words)]
    if not matches:
        raise UnknownRunError(f"gpu {cells.text('gpu')!r} is none of {', '.join(HARDWARE)}")
    sized = [name for name in matches if name.split("-")[-1] in words]
    name = sized[0] if sized else matches[-1]
    if not text or (not sized and len(matches) > 1):
        cells.assumed.append(f"gpu={name}")
    network = next((rate for cluster, rate in NETWORKS_GB_PER_S.items() if cluster in text), None)
    hardware = replace(HARDWARE[name], inter_node_gb_per_s=network) if network else HARDWARE[name]
    if bandwidth := re.search(r"\b(\d+(?:\.\d+)?) ?tb/s", text):
        hardware = replace(hardware, memory_gb_per_s=1000 * float(bandwidth.group(1)))
    if watts := re.search(r"\b(\d+) ?w\b", text):
        share = (float(watts.group(1)) / RATED_W.get(name, float(watts.group(1)))) ** RATE_BY_POWER
        hardware = replace(hardware, sustained=share * hardware.sustained)
    size = re.search(r"\b(\d+) ?gi?b\b", text)
    memory_gib = USABLE_MEMORY * float(size.group(1)) if size and not sized else hardware.memory_gib
    differs = abs(memory_gib / hardware.memory_gib - 1) > OTHER_SIZE
    return replace(hardware, memory_gib=memory_gib) if differs else hardware
