"""Weights of a model sharded by FSDP2 on the meta device: each process reads only the rows of its own shards."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from stages.adapters.files import INNER
from stages.adapters.quantized import QuantizedLinear
from stages.core.errors import ModelError
from stages.engines.fsdp.model import LARGEST_DIFFERENCE, TargetLogProbabilities, check_log_probabilities
from stages.engines.fsdp.mtp import read_mtp
from stages.engines.fsdp.optimizer import full_tensor, local_of
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.parallelize import apply_fsdp, device_mesh, fsdp_modules, split_model
from stages.engines.fsdp.probe import LENGTHS
from stages.engines.fsdp.sources import ModelFiles
from stages.models.layers import keep_kinds_of_layers, transformer_layers
from stages.models.loaded_weights import check_all_finite
from stages.parallel.layout import Layout

LARGEST_CHANGE = 1e-2
"""Largest relative change of a weight's gradient norm by tensor parallelism in fp32; a lost sum changes it by more."""
LEAST_NORM = 1e-5


def drop_weights(model: nn.Module, dropped: Collection[nn.Parameter]) -> None:
    """Move the given parameters of a model to the meta device, to free their memory. Tied parameters stay tied."""
    # By identity: tied parameters are one key, and so become one parameter on `meta`.
    emptied = {id(one): nn.Parameter(one.to("meta"), requires_grad=one.requires_grad) for one in dropped}
    for module in model.modules():
        for name, weight in _own_weights(module):
            setattr(module, name, emptied.get(id(weight), weight))


def read_shards(causal_lm: Any, files: ModelFiles, device: torch.device) -> None:
    """Read this process's shards of parameters on the meta device, and buffers, from the files. Collective.

    device: that holds the shards. Raises ModelError, everywhere, for weights of another shape or not finite.
    """
    reader = _ShardReader(causal_lm, device)
    for name, rows in files.read(reader.rows_of):
        reader.take(name, rows)
    for name, rows in read_mtp(causal_lm, files, reader.rows_of):
        reader.take(name, rows)
    # Every process learns of every bad weight, so that all raise and none waits in the next collective.
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, reader.not_finite)
    check_all_finite(files.folder, sorted({name for names in everyones for name in names}))
    left = [name for name, one in causal_lm.named_parameters() if one.is_meta]
    assert not left, left


def check_sharded(
    model: TargetLogProbabilities,
    twin: TargetLogProbabilities,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Check that a sharded model gives the log-probabilities that Transformers gives, in fp32. Collective.

    twin: a copy on `meta` from before sharding; cut to layers of every kind, since all its weights are gathered three
    times.
    """
    keep_kinds_of_layers(twin.causal_lm)
    # In fp32, whatever training computes in: bf16 alone would differ by more than the tolerance.
    is_sharded = mesh.size() > 1
    if is_sharded:
        split_model(twin, layout, mesh)
        apply_fsdp(twin, transformer_layers(twin.causal_lm), layout, mesh, torch.float32)
    in_fp32: dict[int, Tensor] = {}  # by identity, so that tied weights stay one
    for prefix, module in twin.named_modules():
        # The model's own shards, not copies: both are cut in the same way, by the same mesh.
        for name, weight in _own_weights(model.get_submodule(prefix)):
            setattr(module, name, weight if is_sharded else in_fp32.setdefault(id(weight), _in_fp32(weight, device)))
    check_log_probabilities(twin, device)
    # Cycles keep the twin until a collection, and with it weights in fp32: the head, which the root keeps gathered, or
    # one process's copies.
    for one in fsdp_modules(twin):
        one.reshard()
    if not is_sharded:
        drop_weights(twin, list(twin.parameters()))


def check_split(
    split: TargetLogProbabilities,
    whole: TargetLogProbabilities,
    files: ModelFiles,
    layout: Layout,
    device: torch.device,
) -> None:
    """Check that a model whose matrices or experts are split gives the whole one's log-probabilities and gradients.

    A plan may lack a sum over processes, which no comparison of the split model with itself would show. Collective.
    split, whole: copies on `meta` from before sharding; they are cut to layers of every kind. Raises ModelError.
    """
    num_shares = layout.data_parallel_size * layout.cp
    degrees = {name: getattr(layout, name) for name in ("tp", "ep", "sequence_parallel")}
    layouts = Layout(dp_shard=num_shares, **degrees), Layout(dp_shard=num_shares * layout.tp)
    meshes = device_mesh(layouts[0], device), device_mesh(layouts[1], device)
    measured = []
    experts = f", and its experts over ep {layout.ep} processes" if layout.ep > 1 else ""
    how = f"split over tp {layout.tp} processes by Transformers' plan{experts}, {type(whole.causal_lm).__name__}"
    whole_tokens = "`sequence_parallel: false`, or " if layout.tp > 1 and layout.sequence_parallel else ""
    ones = "`tp: 1`" if layout.ep == 1 else "`tp: 1` and `ep: 1`"
    remedy = f"set {whole_tokens}{ones}, and spread the model by `dp_shard`"
    for model, split_as, own in zip((split, whole), layouts, meshes, strict=True):
        keep_kinds_of_layers(model.causal_lm)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        split_model(model, split_as, own)
        apply_fsdp(model, transformer_layers(model.causal_lm), split_as, own, torch.float32)
        read_shards(model.causal_lm, files, device)
        try:
            measured.append(_values_and_norms(model, split_as.dp_shard, device))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:  # of a plan that does not fit the model's code: the same on each process
            raise ModelError(f"{how} does not run: {str(error).partition(chr(10))[0]}; {remedy}") from error
    (values, norms), (expected, expected_norms) = measured
    difference = (values - expected).abs().max().item()
    largest = max(expected_norms.values())
    # Of weights whose gradient is next to none, the rounding of the others is all that is seen.
    ratios = {name: abs(norms[name] - norm) / max(norm, LEAST_NORM * largest) for name, norm in expected_norms.items()}
    # Also where one is NaN.
    wrong = [f"the gradient of {name} by {ratio:.1%}" for name, ratio in ratios.items() if not ratio < LARGEST_CHANGE]
    if not difference < LARGEST_DIFFERENCE:
        wrong.insert(0, f"log-probabilities by {difference:.2g} nats")
    if wrong:
        raise ModelError(f"{how} differs from the whole model: {', '.join(wrong[:3])}; {remedy}")


def _values_and_norms(
    model: TargetLogProbabilities, num_shares: int, device: torch.device
) -> tuple[Tensor, dict[str, float]]:
    """Return the log-probabilities of drawn documents, and each weight's norm of the gradient of their sum.

    num_shares: data-parallel processes, which all have the same documents, and whose gradients FSDP2 adds up.
    """
    config = model.causal_lm.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)
    # The embedding of padding is 0, at which Gemma 3n's roots of mean squares have no gradient.
    tokens = torch.tensor([one for one in range(config.vocab_size) if one != padding][: sum(LENGTHS)])
    documents = tokens[torch.arange(sum(LENGTHS)) % len(tokens)].split(LENGTHS)
    batch = (model.drawn.batches(torch.float32)[0] if model.drawn else packed(documents)).to(device)
    model.causal_lm.eval()
    log_probabilities = model(batch)
    (log_probabilities.sum() / num_shares).backward()
    norms = {}
    for name, parameter in model.causal_lm.named_parameters():
        if parameter.grad is not None:
            norms[name] = full_tensor(parameter.grad).norm().item()
        parameter.grad = None
    for one in fsdp_modules(model):
        one.reshard()
    return log_probabilities.detach(), norms


class _ShardReader:
    """Reader that copies weights from model files into this process's shards, also in models with LoRA adapters."""

    def __init__(self, causal_lm: Any, device: torch.device) -> None:
        self._device = device
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._sharing: dict[int, list[tuple[nn.Module, str]]] = {}
        self.not_finite: list[str] = []
        # Duplicates too: a shared weight must be replaced in every module that has it.
        for prefix, module in causal_lm.named_modules(remove_duplicate=False):
            for name, weight in _own_weights(module):
                self._owners[f"{prefix}.{name}".replace(INNER, "")] = module, name
                self._sharing.setdefault(id(weight), []).append((module, name))
            if isinstance(module, QuantizedLinear):
                # Files have the matrix that the codes are made of, under its usual name.
                self._owners[f"{prefix}.weight".replace(INNER, "")] = module, "codes"

    def rows_of(self, name: str) -> slice | None:
        """Return the rows of a weight that this process must read from the files; None if it needs no row."""
        if name not in self._owners:
            return None
        module, attribute = self._owners[name]
        kept = getattr(module, attribute)
        if isinstance(kept, nn.Parameter):
            return _rows(kept) if kept.is_meta else None  # None: it has values already, such as a new score head
        return slice(0, len(kept)) if kept.ndim else slice(None)  # a buffer, whole on every process

    def take(self, name: str, rows: Tensor) -> None:
        """Copy rows of a weight, read to the CPU, into this process's shard of it."""
        if rows.is_floating_point() and not torch.isfinite(rows).all():
            self.not_finite.append(name)
        module, attribute = self._owners[name]
        kept = getattr(module, attribute)
        if isinstance(module, QuantizedLinear) and attribute == "codes":
            for part, value in module.quantized(rows.to(self._device)).items():
                self._replace(getattr(module, part), value, name)
        elif isinstance(kept, nn.Parameter):
            self._replace(kept, _own_part(kept, rows), name)
        else:
            kept.copy_(rows)

    def _replace(self, empty: nn.Parameter, rows: Tensor, name: str) -> None:
        expected = list(local_of(empty).shape)
        if list(rows.shape) != expected:
            raise ModelError(
                f"reading {name}: found {list(rows.shape)} as this process's rows of it, expected {expected} by "
                "config.json; fetch or save the model again"
            )
        read: Tensor = rows.to(self._device, empty.dtype, copy=True).contiguous()  # files are to be let go
        if isinstance(empty, DTensor):
            # As FSDP2 does it: `DTensor.from_local` moves shards that stay in host memory to the mesh's device.
            read = DTensor(read, empty._spec, requires_grad=False)
        parameter = nn.Parameter(read, requires_grad=empty.requires_grad)
        for module, attribute in self._sharing[id(empty)]:
            setattr(module, attribute, parameter)


def _own_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module itself, without its submodules'; shared ones are included."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _in_fp32(weight: Tensor, device: torch.device) -> Tensor:
    """Return a weight of one process in fp32 on a device, the same tensor if it is; codes of quantized ones stay bytes.

    With `cpu_offload` weights are in host memory.
    """
    local = local_of(weight).to(device)
    local = local.float() if local.is_floating_point() else local
    return nn.Parameter(local, requires_grad=False) if isinstance(weight, nn.Parameter) else local


def _rows(parameter: Tensor) -> slice:
    if not parameter.ndim:
        return slice(None)
    if not isinstance(parameter, DTensor) or _splits_rows(parameter):
        return slice(0, len(parameter))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def _own_part(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return this process's part of a parameter's rows: a plan may split columns, or rows in turns."""
    if not isinstance(parameter, DTensor) or rows.shape == parameter.to_local().shape:
        return rows
    placed = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    if not _splits_rows(parameter):
        placed = {name: one for name, one in placed.items() if not _is_of_rows(one)}
    mesh = parameter.device_mesh[tuple(placed)]
    return distribute_tensor(rows, mesh, list(placed.values()), src_data_rank=None).to_local()


def _splits_rows(parameter: DTensor) -> bool:
    """Return whether a plan splits the parameter's rows, perhaps in turns."""
    placed = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    return "tp" in placed and _is_of_rows(placed["tp"])


def _is_of_rows(placement: Placement) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == 0
