"""Application of a parallel layout to an FSDP2 model: recomputation, compilation, sharding, loading of weights."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.core.errors import ModelError
from stages.engines import attention_kernels  # noqa: F401  # its operations are in the table below
from stages.engines.fsdp.experts import DIMENSION, OTHERS, exchange_tokens, shard_of, spread_experts, spread_in
from stages.engines.fsdp.model import TargetLogProbabilities
from stages.engines.fsdp.offload import offload_activations
from stages.engines.fsdp.split_adapters import plan_adapters
from stages.engines.fsdp.tensor_parallel import matrices_left_whole, split_matrices
from stages.engines.fsdp.token_parallel import split_tokens
from stages.engines.mixers import has_mixers, mixing_again
from stages.models.layers import text_layers, transformer_layers
from stages.models.loaded_weights import convert_stored_buffers, dtype_of_weights, modules_kept_in_fp32
from stages.parallel.accelerator import of_device
from stages.parallel.host_memory import give_back_freed_memory
from stages.parallel.layout import Layout

LEAST_FREED_BYTES = 2**28
"""Freed memory from which on it is given back between layers on a CPU: less is soon taken again."""


class AllToAllReduceScatter:
    """Reduce-scatter on CPUs for `FSDPModule.set_custom_reduce_scatter`: an all-to-all and a sum.

    gloo's own costs 2.4 times the processor time of exchanging the parts and adding them up.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new communication buffer each time. A reduction may outlive the layer that asked for the buffer.

        Before it comes, what the backward pass has freed is given back: the head's gradients, which are reduced last,
        would come on top of all layers' activations.
        """
        give_back_freed_memory(LEAST_FREED_BYTES)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor` [processes × n] over processes; write this process's part to `output_tensor` [n]."""
        assert op == dist.ReduceOp.SUM, op
        # [processes × n]: this process's part of the tensor, as each process has it
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)


COSTLY_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.lifecycle.padded_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""Operations whose results `recompute: selective` keeps for the backward pass; all others are computed again."""


def device_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes: [dp_shard], before it [dp_replicate], and after it [tp], where they are > 1.

    Those of `cp` share parameters, too: the mesh's `dp_shard` counts them.
    """
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.optimizer_shards, "tp": layout.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def sharding_mesh(mesh: DeviceMesh, names: Sequence[str] = ("dp_replicate", "dp_shard")) -> DeviceMesh:
    """Return the part of a mesh over which parameters are sharded by FSDP2."""
    named = tuple(name for name in mesh.mesh_dim_names or () if name in names)
    return mesh if named == mesh.mesh_dim_names else mesh[named]


def batch_groups(layout: Layout, device: torch.device) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the processes that share global batches with this one, and those that share its tokens.

    None for the former: all processes; for the latter: no other.
    """
    if layout.cp * layout.tp == 1:
        return None, None
    sizes = layout.data_parallel_size, layout.cp, layout.tp
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "cp", "tp"))
    return mesh.get_group("data"), mesh.get_group("cp") if layout.cp > 1 else None


def check_slices(model: TargetLogProbabilities, layout: Layout) -> None:
    """Raise ModelError if the layout shares tokens between processes, and a model needs them all on one."""
    verdict, name = model.verdict, type(model.causal_lm).__name__
    if layout.cp == 1 or (verdict.packs and not verdict.mixers):
        return
    if verdict.mixers:
        why = f"{' and '.join(sorted(one.__name__ for one in verdict.mixers))} of {name} carry a state along the tokens"
    else:
        why = f"documents of {name} train as rows of their own"
    raise ModelError(
        f"layout: cp {layout.cp} shares the tokens of a document, but {why}; set `cp: 1`, and `dp_shard: "
        f"{layout.optimizer_shards}`"
    )


def parallelize(model: TargetLogProbabilities, layout: Layout, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Apply a layout's recomputation, compilation, sharding and prefetching to the model in place.

    Afterwards parameters are DTensors on `mesh`, with rank 0's weights; those on `meta` stay there for `shards.py`. On
    one process some stay as they are (`used_as_they_are`).
    """
    layers = transformer_layers(model.causal_lm)
    # Of one process alone every weight is its own shard: keeping them here would keep the model twice.
    is_spread = mesh.size() > 1 and not any(one.is_meta for one in model.parameters())
    weights: dict[str, torch.Tensor] = {}
    if is_spread and dist.get_rank() == 0:  # kept here, since shards replace the parameters
        weights = {name: value.detach() for name, value in model.state_dict().items()}
    # Before sharding, whose hooks then lie outside of the compiled code.
    split_model(model, layout, mesh)
    if layout.compile:
        # Towers are not compiled: each picture has another size, which would compile them again.
        seen = [] if model.drawn is None else [one for one in layers if one not in text_layers(model.causal_lm)]
        compile_layers([one for one in layers if one not in seen], layout, packs=model.verdict.packs)
        recompute_layers(seen, layout)
        model.is_compiled = True
    else:
        apply_recompute(model.causal_lm, layout)
    if layout.recompute == "offload":
        # Other units of towers, such as embeddings of patches, keep what they save, as where layers are recomputed.
        of_text = text_layers(model.causal_lm)
        layers_that_can = [one for one in layers if one in of_text or isinstance(one, GradientCheckpointingLayer)]
        offload_activations(layers_that_can, torch.device(mesh.device_type))
    apply_fsdp(model, layers, layout, mesh, compute_dtype)
    apply_prefetch(model, layers, layout.prefetch_layers)
    if mesh.device_type == "cpu":
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: give_back_freed_memory(LEAST_FREED_BYTES))
    if is_spread:
        _spread_weights(model, weights, mesh)


def split_model(model: TargetLogProbabilities, layout: Layout, mesh: DeviceMesh) -> None:
    """Split a model's matrices, vocabulary and tokens over the mesh's `tp` processes, its experts over `ep`."""
    experts: Sequence[nn.Module] = ()
    if layout.ep > 1:
        degrees = layout.optimizer_shards // layout.ep, layout.ep
        model.expert_mesh = mesh._unflatten("dp_shard", degrees, (OTHERS, DIMENSION))
        # Tokens travel within what `tp` adds up: a sum of results is smaller than one of what each expert gave.
        experts = exchange_tokens(model.causal_lm, model.expert_mesh.get_group(DIMENSION))
    if layout.tp > 1:
        if layout.sequence_parallel:
            split_tokens(model.causal_lm, mesh.get_group("tp"))
        if any(hasattr(one, "lora_A") for one in model.modules()):
            plan_adapters(model.causal_lm)
        split_matrices(model.causal_lm, mesh["tp"])
        model.vocabulary_group, model.left_whole = mesh.get_group("tp"), matrices_left_whole(model.causal_lm)
    if model.expert_mesh:
        spread_experts(experts, model.expert_mesh)


def apply_recompute(causal_lm: Any, layout: Layout) -> None:
    """Turn on activation recomputation in each layer, of all operations or of all but matrix products and attention."""
    if layout.recomputes:
        layers = transformer_layers(causal_lm)
        options = _checkpoint_options(layout, has_mixers(layers), keeps=_keep_unbiased if _has_biases(layers) else None)
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_layers(layers: list[nn.Module], layout: Layout, *, packs: bool = True) -> None:
    """Compile each layer's forward pass, with attention and the checkpoint that recomputes it, as one graph.

    Around compiled code, where Transformers has it, a checkpoint keeps none of the products that are inside. A layer
    with a mixer, which is not compiled, is two graphs, and has it there. packs: False where documents are rows of their
    own, of which each batch has another number and length: one graph is compiled for all, and one for a single row.
    """
    compiled = partial(torch.compile, dynamic=None if packs else True)
    for layer in layers:
        mixes = has_mixers([layer])
        forward = compiled(layer.forward) if mixes else layer.forward
        if layout.recomputes:
            forward = partial(_recomputed, forward, _checkpoint_options(layout, mixes))
        layer.forward = forward if mixes else compiled(forward)


def recompute_layers(layers: list[nn.Module], layout: Layout) -> None:
    """Recompute the layers of a tower that stay as they are beside compiled ones."""
    for layer in layers:
        if layout.recomputes and isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_recomputed, layer.forward, _checkpoint_options(layout, mixes=False))


def _recomputed(forward: Callable[..., Any], options: dict[str, Any], *states: Any, **arguments: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*states, **arguments)
    return checkpoint(partial(forward, **arguments), *states, **options)


def _checkpoint_options(
    layout: Layout, mixes: bool, keeps: Callable[..., CheckpointPolicy] | None = None
) -> dict[str, Any]:
    policy = keeps or _keep_costly
    selective = [partial(create_selective_checkpoint_contexts, policy)] if layout.recompute == "selective" else []
    # Only for layers with mixers: a checkpoint that is compiled takes no other contexts than selective ones.
    contexts = [partial(mixing_again, *selective)] if mixes else selective
    return {"use_reentrant": False, **({"context_fn": contexts[0]} if contexts else {})}


def apply_fsdp(
    model: TargetLogProbabilities, layers: list[nn.Module], layout: Layout, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> None:
    """Shard by FSDP2 each layer, the input embedding unless tied to the head, and all other weights as one group.

    Modules that the architecture keeps in fp32 are sharded apart, and single weights are left as they are in a group.
    """
    options: dict[str, Any] = {
        "mesh": sharding_mesh(mesh),
        "offload_policy": CPUOffloadPolicy(pin_memory=of_device(torch.device(mesh.device_type)).pins_host_memory)
        if layout.cpu_offload
        else OffloadPolicy(),
    }
    if mesh.size() == 1 and not layout.cpu_offload:  # of all processes, those of `tp` included
        options["ignored_params"] = used_as_they_are(model, compute_dtype)
        for one in options["ignored_params"]:  # FSDP2 moves its own alone; those on `meta` are read to the device
            one.data = one.data if one.is_meta else one.data.to(mesh.device_type)
    dtype_of = dtype_of_weights(model.causal_lm, compute_dtype)
    convert_stored_buffers(model.causal_lm, dtype_of)
    alone, beside_others = modules_kept_in_fp32(model.causal_lm, compute_dtype, dtype_of)
    places = {
        (model.causal_lm.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in beside_others
    }
    for module in alone:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    embedding = model.causal_lm.get_input_embeddings()
    separate = [] if embedding.weight is model.causal_lm.get_output_embeddings().weight else [embedding]
    # A vision tower that text leaves alone is never gathered. With a dtype of reductions, accumulating whole gradients
    # would ask for its gathered weights (torch 2.13: `FSDPParam` has no `_unsharded_param`).
    frozen = MixedPrecisionPolicy(param_dtype=compute_dtype)
    of_text = text_layers(model.causal_lm)
    if model.expert_mesh:
        shard_experts(model.causal_lm, layout, model.expert_mesh, options)
    for module in [*separate, *layers]:
        policy = options["mp_policy"] if any(one.requires_grad for one in module.parameters()) else frozen
        # Layers of text get what Transformers gives them: a cast would round the rotary angles (OLMo, ERNIE) and the
        # residual states (Mamba 2) that it keeps in fp32. Towers get pictures in fp32.
        policy = replace(policy, cast_forward_inputs=module not in of_text)
        fully_shard(module, **{**options, "mp_policy": policy}, reshard_after_forward=layout.reshard_after_forward)
    # Last: the root takes the weights that no group above has. The head's backward follows its
    # forward at once, so that the root stays gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    for module in fsdp_modules(model):
        # Losses come divided by the count of the global batch: gradients add up, they are not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if mesh.device_type == "cpu":
            module.set_custom_reduce_scatter(AllToAllReduceScatter())
    reduce_unused(model)
    keep_in_fp32(model, places)


def shard_experts(causal_lm: nn.Module, layout: Layout, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard the stacks of experts that a process has over the processes that have the same ones."""
    # The router's weights stay in its dtype, as where a layer's experts are in the layer's group.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    own = {"mesh": sharding_mesh(mesh, ("dp_replicate", OTHERS)), "mp_policy": policy}
    placed = {
        "shard_placement_fn": shard_of(mesh[OTHERS].size()),
        "reshard_after_forward": layout.reshard_after_forward,
    }
    for module in spread_in(causal_lm):
        fully_shard(module, **{**options, **own, **placed})


def used_as_they_are(model: nn.Module, compute_dtype: torch.dtype) -> set[nn.Parameter]:
    """Return the parameters that one process need not copy before each use: FSDP2 would, though nothing is gathered.

    Frozen ones that are kept in the dtype of computation, or as bytes; all, where everything is in fp32. Otherwise
    those that learn are cast, and their gradients are added up in fp32, both by FSDP2.
    """
    learning = [one for one in model.parameters() if one.requires_grad]
    are_whole = compute_dtype == torch.float32 and all(one.dtype == torch.float32 for one in learning)
    return {
        one
        for one in model.parameters()
        if (are_whole if one.requires_grad else one.dtype in (compute_dtype, torch.uint8))
    }


def reduce_unused(model: nn.Module) -> None:
    """Make every process reduce gradients of all trainable weights, with zeros for experts that got no tokens.

    Otherwise processes would reduce different weights, and their collectives would not meet.
    """
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        _as_fsdp(model).set_reduce_scatter_unused_params(True)
        return
    # torch 2.11 and 2.12 have no method for it, and one group of parameters a module.
    for module in fsdp_modules(model):
        for group in _groups_of(module):
            group.post_backward = partial(_post_backward_of_all, group, group.post_backward)


def keep_in_fp32(model: nn.Module, places: Collection[tuple[nn.Module, str]]) -> None:
    """Compute single weights, named by module and attribute, in fp32 amid a group that FSDP2 casts to another dtype.

    FSDP2 has one policy a group, and reduces gradients of one dtype: here all are converted to fp32 before.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for group in (group for module in fsdp_modules(model) for group in _groups_of(module)) if places else ():
        kept = [one for one in group.fsdp_params if (one._module_info.module, one._module_info.param_name) in places]
        for weight in kept:
            weight.init_dtype_attrs = partial(_init_dtypes, weight.init_dtype_attrs, policy)
        if kept:
            reduced = partial(_post_backward_in_fp32, group, group.post_backward)
            # Zeros for weights without a gradient come before, in the dtype of each.
            group.post_backward = partial(_post_backward_of_all, group, reduced)


def _groups_of(module: FSDPModule) -> list[Any]:
    """Return a module's groups of parameters; in torch 2.11 and 2.12 there is one."""
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [*filter(None, [state._fsdp_param_group])]


def _init_dtypes(init: Callable[[MixedPrecisionPolicy], None], policy: MixedPrecisionPolicy, *of_group: Any) -> None:
    init(policy)


def _post_backward_in_fp32(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """Add gradients to earlier micro-batches', in fp32, before FSDP2 reduces them together."""
    for weight in group.fsdp_params if group.reduce_grads else ():
        if hasattr(weight, "_unsharded_param"):
            weight.accumulate_unsharded_grad_if_needed()
            weight.to_accumulated_grad_if_needed()
    post_backward(*unused)


def _post_backward_of_all(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """Give weights without a gradient a zero gradient before FSDP2 reduces the gradients of their group."""
    for weight in group.fsdp_params if group.reduce_grads else ():
        # Never gathered in this pass, or with a sum over earlier micro-batches.
        if not hasattr(weight, "_unsharded_param") or weight.unsharded_accumulated_grad is not None:
            continue
        parameter = weight.unsharded_param
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    post_backward(*unused)


def apply_prefetch(model: nn.Module, layers: list[nn.Module], num_layers: int) -> None:
    """Make each layer gather the parameters of the next `num_layers` layers early, forward and backward."""
    if not num_layers:
        return
    order = [_as_fsdp(module) for module in [model, *layers]]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + num_layers])
        # From 1: the root is gathered already. Reversed, since backward runs from the last layer to the first.
        module.set_modules_to_backward_prefetch(order[max(1, index - num_layers) : index][::-1])
    # The root's backward, of the head, comes first: it gathers the last layers, the last one first.
    order[0].set_modules_to_backward_prefetch(order[: -num_layers - 1 : -1])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards as groups, each of which gathers its parameters together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_unbiased(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what `_keep_costly` does but results of experts, to which Transformers adds biases in place."""
    if operation is torch.ops.aten._grouped_mm.default:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keep_costly(context, operation)


def _has_biases(layers: list[nn.Module]) -> bool:
    """Return whether a layer has a stack of experts with biases."""
    return any(getattr(one, "has_bias", False) for layer in layers for one in layer.modules())


@torch.no_grad()
def _spread_weights(model: TargetLogProbabilities, weights: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    # Collective: only rank 0 has `weights`. Torch's own way takes a shard for one rectangle, which those of fused
    # matrices are not.
    for name, kept in model.state_dict().items():
        whole = torch.empty(kept.shape, dtype=kept.dtype, device=mesh.device_type)
        if name in weights:
            whole.copy_(weights[name])
        dist.broadcast(whole, src=0)
        if isinstance(kept, DTensor):
            own = distribute_tensor(whole, kept.device_mesh, kept.placements, src_data_rank=None)
            kept.to_local().copy_(own.to_local())
        else:
            kept.copy_(whole)
    for buffer in model.buffers():  # rotary frequencies and the like are in no state dict
        dist.broadcast(buffer, src=0)
