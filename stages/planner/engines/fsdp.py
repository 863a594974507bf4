"""Memory and time costs of the FSDP2 engine, which shards everything and gathers each layer (Zhao et al. 2023).

Selective recomputation and adapters are those of PyTorch and PEFT.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from stages.models.linear_layers import linear_layers, stacked_parameters
from stages.parallel.engines.fsdp import can_split_tokens
from stages.parallel.layout import Layout
from stages.planner import network
from stages.planner.adapted import frozen_bytes, gathered_layer_bytes, saved_parameters
from stages.planner.compilation import not_compiled
from stages.planner.compute import LayerTime, PassTimes
from stages.planner.costs import EngineCosts, Moment, SearchRequest, StepCase, TimedCase
from stages.planner.network import Traffic
from stages.planner.partition import PipelineStage, RankParameters, outside_parameters, rank_parameters
from stages.planner.towers import frozen_parts, layers_of_towers
from stages.planner.workload import ProgramTraits

LEAST_TOKENS_OF_A_CONTEXT_RANK = 1024


class FsdpCosts(EngineCosts):
    """Memory and time costs of PyTorch's FSDP2 around Transformers' layers, whose norms are unfused operations."""

    name = "fsdp"
    software = ProgramTraits(fused_elementwise=False, fragments_states=True, casts_at_products=True, asks_python=True)
    keeps_products = True
    joins_layers = False
    merges_experts = True
    skips_frozen_start = True
    exchanges_heads = True
    splits_by_plan = True
    more_with_batch = False  # the largest has no gradients to add up

    def optimizer_parameters(self, held: RankParameters, layout: Layout) -> float:
        # Those that hold the same experts share their shards.
        return (held.dense + layout.ep * held.expert) / layout.optimizer_shards

    def model_states(self, case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
        layout, workload = case.layout, case.workload
        if layout.cpu_offload:
            return 0.0, 0.0, 0.0
        adapter, shards, size = workload.adapter, layout.optimizer_shards, workload.state_bytes
        if adapter is None:
            held = _held(case, stage)
            learning = self.optimizer_parameters(case.trained(stage), layout)
            matrices = _muon_matrices(case, stage) / shards
            weights = size.weight * self.optimizer_parameters(held, layout)
            # Muon keeps one fp32 moment of a matrix instead of two.
            return weights, size.weight * learning, size.moments * learning - 4 * matrices
        trained = self.optimizer_parameters(case.trained(stage), layout)
        share = self.optimizer_parameters(_held(case, stage), layout) / case.shape.num_parameters
        frozen = share * frozen_bytes(case.shape, adapter, workload.compute_bytes)
        # LoRA factors and their gradients are in fp32, whatever the base is stored in.
        return frozen + 4 * trained, 4 * trained, size.moments * trained

    def bytes_at_rest(self, case: StepCase, stage: PipelineStage) -> float:
        """Return the bytes of weights and optimizer state, and of weights that a forward pass leaves gathered.

        Gradients are freed after each step. After a forward pass alone, the root and layers that are not gathered again
        for a backward pass stay gathered.
        """
        weights, _, optimizer = self.model_states(case, stage)
        layer, root, embedding = _groups(case, stage)
        kept = 0.0 if _gathers_again(case.layout) else stage.num_layers * layer.gathered + embedding.gathered
        return weights + optimizer + root.gathered + kept

    def moments(self, case: StepCase, stage: PipelineStage) -> tuple[Moment, ...]:
        """Return the moments of the last micro-batch at which a rank may hold most memory, in their order.

        The root (the head, and the last norm) stays gathered from the forward pass to the end of the backward pass. Its
        gradients are reduced last: only then FSDP2 knows that no more come.
        """
        layout, size, num_layers = case.layout, case.workload.compute_bytes, stage.num_layers
        layer, root, embedding = _groups(case, stage)
        _, gradients, _ = self.model_states(case, stage)
        learning = case.trained(stage).total
        shard = gradients / max(1.0, learning)
        # Sums over earlier micro-batches: shards, or whole gradients in fp32, of which shards count as gradients.
        adds_up = int(case.micro_batches) > 1
        sums, keeps_whole = gradients if adds_up else 0.0, adds_up and _reduces_once(case)
        whole = 4 * learning - gradients if keeps_whole else 0.0
        # Weights arrive in a buffer, from which they are copied; one process copies its own. Layers are gathered ahead:
        # backward one even without an order.
        is_alone, is_kept = layout.optimizer_shards == 1, not _gathers_again(layout)
        arriving, gathers_ahead = (not is_alone) * layer.gathered, not is_alone and not is_kept
        ahead = min(layout.prefetch_layers, num_layers - 1) * gathers_ahead
        behind = max(1, layout.prefetch_layers) * gathers_ahead
        kept = (num_layers - 1) * layer.gathered + embedding.gathered if is_kept else 0.0
        held = whole + root.gathered + kept
        outside = root.gathered + embedding.gathered
        # Forward, a group's buffer is kept until the next one is copied out of its own: first the root's.
        first = (not is_alone) * outside + ahead * layer.gathered
        moments = [
            Moment("embedding", sums, whole + outside, first, num_layers),
            Moment("forward", sums, held + layer.gathered, arriving + ahead * layer.gathered, ahead),
            Moment("forward", sums, held + layer.gathered, arriving),
            Moment("head", sums, held + is_kept * layer.gathered, min(behind, num_layers) * layer.gathered),
        ]
        # Bytes of a gradient until its group's reduction. One process in fp32 adds gradients up where they are.
        is_copied = _is_copied(case)
        waiting = size if is_copied else 0 if adds_up else 4
        # The reduction takes its input; in one process a divided copy besides, in several the last gradient, by a
        # variable of a loop (torch 2.13).
        reduced = 4 * (1 + is_alone) * is_copied
        held_by_loop = 0 if is_alone else 4 if keeps_whole else size
        held = root.gathered + waiting * root.learning + kept
        for done in sorted({0, 1, num_layers - 1} - {num_layers}):
            # The reduction of the layer before may still run, whose input is kept.
            passing = layer.gathered + (waiting + (reduced if done else 0)) * layer.learning
            passing += whole * (1 - done / num_layers)
            shards, next_layers = sums or done * shard * layer.learning, min(behind, num_layers - 1)
            moments.append(Moment("layer", shards, held + passing, next_layers * layer.gathered, done))
        # The embedding is gathered for a backward pass that does not need it; then both are reduced, the root first.
        shards = sums or shard * num_layers * layer.learning
        if case.workload.media:
            # Towers run once tokens are embedded, and the embedding's weights are given back.
            moments.append(
                Moment("forward", sums, whole + root.gathered + is_kept * embedding.gathered, 0.0, num_layers)
            )
            moments.append(Moment("tower", shards, root.gathered + waiting * root.learning + kept, 0.0, num_layers))
        buffers = root.gathered + waiting * root.learning + reduced * layer.learning + embedding.gathered
        moments.append(Moment("nothing", shards, buffers, gathers_ahead * embedding.gathered, num_layers))
        shards = sums or gradients - shard * embedding.learning
        buffers = embedding.gathered + (4 if keeps_whole and is_copied else waiting) * embedding.learning
        buffers += (reduced + held_by_loop) * root.learning
        moments.append(Moment("nothing", shards, buffers, idle_layers=num_layers))
        buffers = (reduced + held_by_loop) * embedding.learning
        moments.append(Moment("nothing", gradients, buffers, idle_layers=num_layers))
        return tuple(moments)

    def data_parallel_traffic(self, case: StepCase, stage: PipelineStage) -> tuple[Traffic, ...]:
        layout, (layer, root, embedding) = case.layout, _groups(case, stage)
        gathered = (1 + _gathers_again(layout)) * (stage.num_layers * layer.gathered + embedding.gathered)
        for tower, _ in case.workload.media_by_tower(case.shape):  # a frozen one has no backward pass
            again = _gathers_again(layout) and case.workload.learns(tower.part)
            gathered += (1 + again) * case.workload.compute_bytes * tower.layer_parameters
        learning = case.trained(stage)
        experts = _experts(case, stage)
        of_experts = (1 + _gathers_again(layout)) * stage.num_layers * experts.gathered
        learning_experts = stage.num_layers * experts.learning
        shards, same = network.shard_group(layout), network.same_experts_group(layout)
        return (
            Traffic("all-gather", shards, _gatherings(case) * (gathered - of_experts + root.gathered)),
            Traffic("all-gather", same, _gatherings(case) * of_experts),
            Traffic("reduce-scatter", shards, _reductions(case) * 4 * (learning.total - learning_experts)),
            Traffic("reduce-scatter", same, _reductions(case) * 4 * learning_experts),
            Traffic("all-reduce", network.replica_group(layout), 4 * self.optimizer_parameters(learning, layout)),
        )

    def data_parallel_s(
        self, case: TimedCase, stage: PipelineStage, layer: LayerTime, head: PassTimes, recompute_s: float
    ) -> float:
        """Return the seconds per step of gathering, gradient reduction and offloading that are not hidden by compute.

        Every micro-batch gathers each layer twice (once if `reshard_after_forward` is off); gradients are reduced after
        each micro-batch or after the last, and then over replicas. Under a pipeline layers stay gathered and gradients
        whole for a step.
        """
        layout, hardware = case.layout, case.hardware
        group, replicas = network.shard_group(layout), network.replica_group(layout)
        of_layer, root, embedding = _groups(case, stage)
        experts = _experts(case, stage)
        gather_s = _layer_gather_s(case, stage)
        reduce_s = network.gather_s(hardware, group, 4 * (of_layer.learning - experts.learning))
        reduce_s += network.gather_s(hardware, network.same_experts_group(layout), 4 * experts.learning)
        # Of each expert, fewer ranks share the sum.
        of_replicas = of_layer.learning + (layout.ep - 1) * experts.learning
        replicas_s = network.all_reduce_s(hardware, replicas, 4 * of_replicas / layout.optimizer_shards)
        forward_s = case.exposed_s(gather_s, layer.both.forward_s)
        # Gathering a layer again for the backward pass.
        again_s = gather_s if _gathers_again(layout) else 0.0
        # All of a layer's communication hides behind the same backward pass, so what each part adds is a difference.
        backward_s = layer.both.backward_s + recompute_s
        without_s, reduced_s, last_s = (
            case.exposed_s(again_s + more_s, backward_s) for more_s in (0.0, reduce_s, reduce_s + replicas_s)
        )
        layers_s = _gatherings(case) * (forward_s + without_s) + _reductions(case) * (reduced_s - without_s)
        # Embedding and head are groups of FSDP's around all layers. The embedding is gathered again, the head is not.
        head_s, learning = head.forward_s + head.backward_s, root.learning + embedding.learning
        outside_s = network.gather_s(hardware, group, root.gathered)
        outside_s += (1 + _gathers_again(layout)) * network.gather_s(hardware, group, embedding.gathered)
        outside_s = _gatherings(case) * case.exposed_s(outside_s, head_s)
        outside_s += _reductions(case) * case.exposed_s(network.gather_s(hardware, group, 4 * learning), head_s)
        outside_s += network.all_reduce_s(hardware, replicas, 4 * learning / layout.optimizer_shards)
        return stage.num_layers * (layers_s + last_s - reduced_s) + outside_s + _offload_s(case, stage)

    def weight_copies(self, case: StepCase, num_adapted: float) -> float:
        """Return 2 for a gathered group, or 2 for each weight that one process casts: FSDP2 casts, then copies.

        From host memory (`cpu_offload`) each weight comes by a copy of its own, frozen ones too.
        """
        if not _is_copied(case):
            return 0.0
        shape, layout, last = case.shape, case.layout, case.shape.num_layers - 1
        weights: float = len(linear_layers(shape, last)) + len(stacked_parameters(shape, last)) + 2 + 2 * shape.qk_norm
        if case.workload.adapter:
            weights = 2 * num_adapted + weights * layout.cpu_offload
        return (2.0 if layout.world_size > 1 else 2.0 * weights) + weights * layout.cpu_offload

    def forward_gather_s(self, case: TimedCase, stage: PipelineStage, layer: LayerTime) -> float:
        if case.layout.pp > 1:
            return 0.0
        return case.exposed_s(_layer_gather_s(case, stage), layer.both.forward_s)

    def degrees(self, request: SearchRequest) -> Iterator[dict[str, Any]]:
        for split in _splits(request):
            together = split["tp"] * split["cp"]
            # Sharded over all devices, or within a node and replicated over nodes, whose network is slower.
            of_node = max(1, min(request.num_gpus, request.hardware.gpus_per_node) // together)
            for dp_shard in sorted({request.num_gpus // together, of_node}):
                if request.num_gpus % (together * dp_shard) == 0:
                    replicas = request.num_gpus // (together * dp_shard)
                    for ep in _spreads(request, dp_shard * split["cp"], split["tp"]):
                        degrees = {**split, "ep": ep, "dp_shard": dp_shard, "dp_replicate": replicas}
                        yield from self._variants(request, degrees)

    def _variants(self, request: SearchRequest, degrees: dict[str, int]) -> Iterator[dict[str, Any]]:
        for compiles in (False,) if not_compiled(request) else (False, True):
            for recompute in ("none", "selective", "full"):
                for reshard in (True, False) if degrees["dp_shard"] * degrees["cp"] > 1 else (True,):
                    variant = {"recompute": recompute, "reshard_after_forward": reshard, "compile": compiles}
                    yield {**degrees, **variant}
                    if degrees["tp"] > 1 and not compiles and can_split_tokens(request.shape):
                        yield {**degrees, **variant, "sequence_parallel": True}
            yield {**degrees, "recompute": "full", "cpu_offload": True, "compile": compiles}


class _Group(NamedTuple):
    """Weights of one process rank that FSDP2 gathers and reduces together: gathered bytes, trainable parameters."""

    gathered: float
    learning: float


def _groups(case: StepCase, stage: PipelineStage) -> tuple[_Group, _Group, _Group]:
    """Return an average layer's group, the root's (head, and last norm), and the embedding's, empty if it is the head.

    Modules that learn beside an adapter count with the head and the embedding first, as they usually are these.
    """
    shape, layout, adapter, size = case.shape, case.layout, case.workload.adapter, case.workload.compute_bytes
    # A tower's layers are groups like those of text, and as a rule smaller.
    in_tower, frozen = layers_of_towers(shape), frozen_parts(shape, case.workload)
    outside = outside_parameters(shape, stage, layout.tp) - in_tower
    in_root = stage.has_head * (shape.head_parameters / layout.tp + shape.other_parameters - in_tower)
    if shape.tied_embeddings or not case.software.separate_embedding:
        in_root = outside
    if adapter:
        saved: float = saved_parameters(shape, adapter)
    else:
        saved = shape.other_parameters - in_tower - frozen.others if frozen.text else outside - frozen.others
    root_learns, outside_learns = min(saved, in_root), min(saved, outside)
    of_layers = case.trained(stage).total - (0.0 if adapter else in_tower - frozen.tower_layers)
    layer_learns = (of_layers - outside_learns) / stage.num_layers
    in_layers = _held(case, stage).total - in_tower - outside
    if adapter is None:
        gathered = size * in_layers / stage.num_layers
    else:
        whole = shape.num_parameters - in_tower - outside_parameters(shape, stage, 1)
        gathered = in_layers / whole * gathered_layer_bytes(shape, adapter, size)
    groups = (
        _Group(gathered, layer_learns),
        _Group(size * in_root, root_learns),
        _Group(size * (outside - in_root), outside_learns - root_learns),
    )
    if layout.world_size > 1 or layout.cpu_offload:
        return groups
    # One process copies only what it has to cast, not what is frozen or computed with as it is.
    layer, root, embedding = (_Group(size * _is_copied(case) * one.learning, one.learning) for one in groups)
    return layer, root, embedding


def _splits(request: SearchRequest) -> Iterator[dict[str, int]]:
    """Yield the degrees worth searching by which a model's matrices, or a row's tokens, are split, (1, 1) first.

    Left out are those that span nodes, and `cp` that does not divide the attention heads of a process.
    """
    shape, workload = request.shape, request.workload
    most = min(request.num_gpus, request.hardware.gpus_per_node)
    heads = {one.num_heads for kind in shape.kinds for one in kind.attention} or {shape.num_heads}
    most_cp = min(most, workload.sequence_length // LEAST_TOKENS_OF_A_CONTEXT_RANK)
    for tp in _powers_of_two(most):
        for cp in _powers_of_two(min(most_cp, most // tp)):
            if cp == 1 or all(number % (tp * cp) == 0 for number in heads):
                yield {"tp": tp, "cp": cp}


def _spreads(request: SearchRequest, num_ranks: int, tp: int) -> Iterator[int]:
    """Yield the degrees worth searching by which experts are spread over ranks of a node, 1 first."""
    most = min(num_ranks, request.hardware.gpus_per_node // tp)
    for ep in _powers_of_two(most if request.shape.num_experts else 1):
        if num_ranks % ep == 0:
            yield ep


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(max(1, most).bit_length())]


def _held(case: StepCase, stage: PipelineStage) -> RankParameters:
    """Count the parameters of one process rank before they are sharded."""
    layout = case.layout
    return rank_parameters(case.shape, stage, layout.tp, layout.ep, case.engine.expert_split(layout))


def _is_copied(case: StepCase) -> bool:
    """Return whether FSDP2 copies weights that learn before each use, to gather or to cast them."""
    return case.layout.world_size > 1 or case.layout.cpu_offload or case.workload.compute_bytes < 4


def _reduces_once(case: StepCase) -> bool:
    """Return whether gradients stay unsharded between micro-batches, and are reduced once per optimizer step."""
    accumulate = case.layout.accumulate
    keeps_whole = case.software.gathers_gradients if accumulate == "auto" else accumulate == "whole"
    return keeps_whole or case.layout.pp > 1


def _muon_matrices(case: StepCase, stage: PipelineStage) -> float:
    """Count the parameters that Muon optimizes with one moment: all but embeddings, the head and vectors."""
    if case.workload.optimizer != "muon":
        return 0.0
    shape, layout = case.shape, case.layout
    held = _held(case, stage)
    learning = held.dense + layout.ep * held.expert  # experts are divided by the whole of `optimizer_shards` below
    # Two norms a layer, and the last one before the head.
    norms = shape.norm_parameters * (2 * stage.num_layers + stage.has_head)
    positions = shape.position_parameters * stage.has_embedding
    return learning - outside_parameters(shape, stage, layout.tp) - norms - positions


def _experts(case: StepCase, stage: PipelineStage) -> _Group:
    """Return the part of a layer's group that is gathered and reduced apart: experts that fewer ranks have."""
    if case.layout.ep == 1:
        return _Group(0.0, 0.0)
    held, learning = _held(case, stage).expert, case.trained(stage).expert
    return _Group(case.workload.compute_bytes * held / stage.num_layers, learning / stage.num_layers)


def _layer_gather_s(case: TimedCase, stage: PipelineStage) -> float:
    """Return the seconds of gathering a layer, in one byte a weight where it is trained in fp8."""
    workload, layout, experts = case.workload, case.layout, _experts(case, stage)
    in_one_byte = workload.in_few_bits and not case.software.casts_at_products and workload.adapter is None
    dense = (_groups(case, stage)[0].gathered - experts.gathered) / (workload.compute_bytes if in_one_byte else 1)
    dense_s = network.gather_s(case.hardware, network.shard_group(layout), dense)
    return dense_s + network.gather_s(case.hardware, network.same_experts_group(layout), experts.gathered)


def _gathers_again(layout: Layout) -> bool:
    """Return whether layers and embedding are freed after the forward pass, to be gathered again for the backward."""
    return layout.reshard_after_forward and layout.pp == 1


def _gatherings(case: StepCase) -> float:
    """Return the number of times a step that weights are gathered for a forward pass."""
    return case.micro_batches if case.layout.pp == 1 else 1.0


def _reductions(case: StepCase) -> float:
    """Return the number of times a step that gradients are reduced over the ranks that share them."""
    return 1.0 if _reduces_once(case) else case.micro_batches


def _offload_s(case: TimedCase, stage: PipelineStage) -> float:
    """Return the seconds per step of CPU offload's copies: weights for each gathering, gradients once."""
    if not case.layout.cpu_offload:
        return 0.0
    workload, shape, layout = case.workload, case.shape, case.layout
    stored = frozen_bytes(shape, workload.adapter, workload.compute_bytes) if workload.adapter else None
    share = case.engine.optimizer_parameters(_held(case, stage), layout)
    shard_bytes = 4 * share if stored is None else share / shape.num_parameters * stored
    # Gathered forward and backward in each micro-batch; the 1 is the gradient's way back.
    return (2 * case.micro_batches + 1) * shard_bytes / (case.hardware.host_gb_per_s * 1e9)
