"""Predicted seconds of communication between devices, from bandwidth, latency and the nodes that the ranks are on.

Ranks are numbered with tensor parallelism fastest, then context, data and pipeline parallelism, so a group has a size
and a stride, the distance of neighbours. One that spans nodes uses all network cards of a node at once (as NCCL's rings
do), and the links within the nodes at the same time.
"""

import math
from dataclasses import dataclass
from typing import Literal

from stages.parallel.layout import Layout
from stages.planner.hardware import Hardware
from stages.planner.partition import expert_replicas


@dataclass(frozen=True)
class Group:
    """Process group that communicates: its number of ranks, and the rank distance of neighbours in the group."""

    size: int
    stride: int

    def ranks_per_node(self, hardware: Hardware) -> int:
        """Return how many ranks of the process group lie on the same node."""
        return min(self.size, max(1, hardware.gpus_per_node // self.stride))


@dataclass(frozen=True)
class Traffic:
    """Bytes that collectives of one kind carry in a training step, over one process group.

    They are those of the whole tensors, of which a rank sends or receives all but its share.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "message"]
    group: Group
    num_bytes: float


def tensor_group(layout: Layout) -> Group:
    """Return the tensor-parallel process group, which consists of adjacent ranks."""
    return Group(layout.tp, 1)


def context_group(layout: Layout) -> Group:
    """Return the context-parallel process group, whose neighbours are `tp` ranks apart."""
    return Group(layout.cp, layout.tp)


def pipeline_group(layout: Layout) -> Group:
    """Return the process group of a pipeline's stages, which are a whole stage's ranks apart."""
    return Group(layout.pp, layout.world_size // layout.pp)


def shard_group(layout: Layout) -> Group:
    """Return the group that shards optimizer state (FSDP: weights, too), context-parallel ranks included."""
    return Group(layout.optimizer_shards, layout.tp)


def same_experts_group(layout: Layout) -> Group:
    """Return the group that shards the experts of one rank where others of its shard group have other experts."""
    return Group(max(1, layout.optimizer_shards // layout.ep), layout.tp * layout.ep)


def replica_group(layout: Layout) -> Group:
    """Return the process group whose ranks hold replicas of the same data-parallel shard."""
    return Group(layout.dp_replicate, layout.tp * layout.cp * layout.dp_shard)


def expert_group(layout: Layout) -> Group:
    """Return the expert-parallel group, `etp` ranks apart: those between share an expert by tensor parallelism."""
    return Group(layout.ep, layout.etp)


def expert_replica_group(layout: Layout) -> Group:
    """Return the process group whose ranks hold the same expert and reduce its gradients together."""
    return Group(expert_replicas(layout), layout.ep * layout.etp)


def gather_s(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of `num_bytes` in total (Thakur et al. 2005)."""
    if group.size == 1 or not num_bytes:  # nothing is sent
        return 0.0
    per_node = group.ranks_per_node(hardware)
    nodes = math.ceil(group.size / per_node)
    # A ring sends each rank all but its own share.
    intra_s = num_bytes * (group.size - 1) / group.size / intra_rate(hardware) if per_node > 1 else 0.0
    # The rings of a node's ranks share the bytes, each over its own network card.
    inter_s = num_bytes * (nodes - 1) / nodes / (per_node * inter_rate(hardware))
    return max(intra_s, inter_s) + _latency_s(hardware, per_node, nodes)


def all_reduce_s(hardware: Hardware, group: Group, num_bytes: float) -> float:
    """Return the seconds of an all-reduce of `num_bytes`, as a reduce-scatter followed by an all-gather."""
    return 2 * gather_s(hardware, group, num_bytes)


def dispatch_s(hardware: Hardware, group: Group, num_bytes: float, experts_per_token: int) -> float:
    """Return the seconds to send `num_bytes` of tokens to their experts, spread evenly over the process group.

    A token is sent once to each other node that has one of its experts (DeepSeek-AI 2024, section 3.2.2), over the
    rank's own network card, and on to the ranks within that node.
    """
    if group.size == 1:
        return 0.0
    per_node = group.ranks_per_node(hardware)
    nodes = math.ceil(group.size / per_node)
    inside_s = num_bytes * experts_per_token * (per_node - 1) / per_node / intra_rate(hardware)
    # (1 - 1/nodes)^k: the chance that none of a token's k experts lies on a given node.
    nodes_met = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts_per_token)
    return max(inside_s, num_bytes * nodes_met / inter_rate(hardware)) + _latency_s(hardware, per_node, nodes)


def neighbour_s(hardware: Hardware, stride: int, num_bytes: float) -> float:
    """Return the seconds of a message to the process rank `stride` places on, over the network if on another node."""
    if stride < hardware.gpus_per_node:
        return num_bytes / intra_rate(hardware) + hardware.intra_node_latency_s
    return num_bytes / inter_rate(hardware) + hardware.inter_node_latency_s


def intra_rate(hardware: Hardware) -> float:
    """Return the bytes/s that one device achieves to the other devices of its node."""
    return hardware.intra_node_gb_per_s * 1e9 * hardware.efficiency.intra_link


def inter_rate(hardware: Hardware) -> float:
    """Return the bytes/s that one device achieves to other nodes, through its share of the network."""
    return hardware.inter_node_gb_per_s * 1e9 * hardware.efficiency.inter_link


def _latency_s(hardware: Hardware, per_node: int, nodes: int) -> float:
    intra_s = hardware.intra_node_latency_s if per_node > 1 else 0.0
    return intra_s + (hardware.inter_node_latency_s * math.log2(nodes) if nodes > 1 else 0.0)
