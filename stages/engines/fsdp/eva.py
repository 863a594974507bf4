"""EVA: LoRA's A starts as the directions in which a layer's inputs vary most (Paischer et al. 2024). PEFT finds them.

Rank 0 runs the whole base on some training rows before the model is spread over processes. The directions of all layers
compete for `rank` × layers places by the variance that they explain: a layer gets up to `eva_rho` times `rank`, or
none. A file keeps them, since an attempt that continues must have the same ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import EvaConfig, LoraConfig
from peft.tuners.lora.eva import get_eva_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.adapters.config import AdapterConfig
from stages.adapters.lora import adapted_layers, add_adapter
from stages.core.errors import ModelError
from stages.data.batch import Batch, Documents, ModelInputs
from stages.engines.attention import hidden_states
from stages.engines.documents import PackedDocuments, pad_documents
from stages.engines.fsdp.model import TargetLogProbabilities
from stages.models.layers import decoder_of
from stages.models.loading import model_without_weights


@dataclass(frozen=True)
class InputRows:
    """Training rows for EVA's initial values of LoRA's A, and the file in which these are kept.

    The micro-batches are on the CPU, each with at least `adapter.highest_rank` learned tokens.
    """

    batches: Sequence[Batch]
    file: Path

    def described(self) -> str:
        """Return a sentence for the user: how many directions EVA found, in how many layers, from how many batches."""
        ranks = [len(one) for one in load_file(self.file).values()]
        without = f"; {ranks.count(0)} explain too little, and have no adapter" if 0 in ranks else ""
        return (
            f"init: eva: {sum(ranks):,} directions of {len(ranks)} layers, of {len(self.batches)} batches of rows; a "
            f"layer has at most {max(ranks)}{without}"
        )


def start_directions(
    model: TargetLogProbabilities, config: AdapterConfig, rows: InputRows, folder: Path, trust_remote_code: bool
) -> dict[str, Tensor]:
    """Return EVA's initial values of LoRA's A, fp32 [rank, inputs], by layer name, on process rank 0 only. Collective.

    model: the model in `folder`, without an adapter. Raises ModelError for layers whose inputs PEFT cannot see.
    """
    directions: dict[str, Tensor] = {}
    shapes: list[Any] = [None]
    if dist.get_rank() == 0:
        if not rows.file.exists():  # an attempt that continues takes the directions of the first
            # PEFT chooses the layers on a copy without weights: an adapter in the model itself would be in the way.
            template = model_without_weights(folder, trust_remote_code=trust_remote_code)
            add_adapter(template, config, seed=0, has_weights=False)
            _keep(principal_directions(model, config, list(adapted_layers(template)), rows.batches), rows.file)
        directions = load_file(rows.file)
        shapes = [{name: tuple(one.shape) for name, one in directions.items()}]
    # Ranks other than 0 need the shapes alone: they build the same adapter, and sharding sends the values.
    dist.broadcast_object_list(shapes, src=0)
    return directions or {name: torch.empty(shape) for name, shape in shapes[0].items()}


def principal_directions(
    model: TargetLogProbabilities, config: AdapterConfig, layers: Sequence[str], batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """Return the directions in which a layer's inputs vary most at learned tokens; PEFT repeats the batches."""
    decoder = decoder_of(model.causal_lm)
    # Mixers run on documents laid out by themselves: here all layers do, so that each is given the same tokens, once.
    laid_out = bool(model.verdict.mixers)
    lora = LoraConfig(
        r=config.rank,
        target_modules=list(layers),
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=config.eva_rho),
    )
    # PEFT's decomposition draws random numbers; training's generator stays as it was.
    with torch.random.fork_rng(devices=[]):
        directions: dict[str, Tensor] = get_eva_state_dict(
            model.causal_lm,
            batches,
            lora,
            forward_fn=lambda _, batch: hidden_states(decoder, _laid_out(batch.inputs) if laid_out else batch.inputs),
            prepare_model_inputs_fn=lambda batch, _: _is_learned(batch, packs=model.verdict.packs and not laid_out),
            prepare_layer_inputs_fn=_learned_inputs,
            gather_distributed_inputs=False,
            show_progress_bar=False,
        )
    return directions


def _is_learned(batch: Batch, *, packs: bool) -> Tensor:
    """Return which tokens carry loss, bool [tokens], in the order of the decoder's layers, as PEFT's labels."""
    has_target = batch.signal.has_target.flatten()
    learned = torch.cat([has_target.new_zeros(1), has_target[:-1]])  # no document's last token has a target
    if packs:
        return learned
    return pad_documents(learned.int(), _in_one_bucket(batch.inputs)).bool().flatten()


def _laid_out(inputs: ModelInputs) -> ModelInputs:
    """Return inputs in which each document has a row of its own, padded at the end to the longest."""
    documents = _in_one_bucket(inputs)
    shape = len(documents.lengths), documents.longest
    input_ids = pad_documents(inputs.input_ids.flatten(), documents).view(shape)
    positions = torch.arange(shape[1], device=input_ids.device).expand(shape)
    numbers = torch.arange(shape[0], device=input_ids.device)[:, None].expand(shape)
    return ModelInputs(input_ids, positions, Documents(numbers, shape[0], [shape[1]] * shape[0]))


def _in_one_bucket(inputs: ModelInputs) -> PackedDocuments:
    return PackedDocuments(inputs.documents.lengths, inputs.input_ids.device, least_fill=0)


def _learned_inputs(inputs: tuple[Tensor, ...], is_learned: Tensor, layer: str) -> Tensor:
    """Return a layer's inputs at the learned tokens, which carry loss: [learned tokens, inputs]."""
    states = inputs[0].flatten(0, -2)  # [tokens, inputs]
    if len(states) != len(is_learned):
        raise ModelError(
            f"adapter.init is eva, but {layer} is given {len(states)} of {len(is_learned)} tokens: EVA compares layers "
            "that see the same ones; say `init: default`, or leave it out with exclude_modules"
        )
    return states[is_learned]


def _keep(directions: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: a crash in between leaves no file that the next attempt would take.
    part = file.with_suffix(".part")
    save_file(
        {name: one.float().clone(memory_format=torch.contiguous_format) for name, one in directions.items()}, part
    )
    part.replace(file)
