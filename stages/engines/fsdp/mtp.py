"""Training of a layer of multi-token prediction (MTP), which Transformers does not build: it predicts two tokens ahead.

For the token at i with last hidden state h (after the model's norm, as servers pass it) the layer reads

    layer(projection [norm(embedding of token i + 1) ; norm(h)])

at position i of the same document, and its output, normed, predicts token i + 2 by the model's own head. The decoder
layer is built like that one of the model's own whose weights have the same names and shapes, and called as that was:
with the same rotary angles, masks and documents. A document's last token has no next one: what the layer reads there
no other token sees, and it has no target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.attention import rows_of_layers
from stages.engines.export import Shapes, own_weight_shapes, weight_shapes
from stages.engines.fsdp.sources import ModelFiles, RowsOf
from stages.engines.weight_slices import WeightFiles
from stages.models.layers import decoder_of, text_layers
from stages.models.loading import model_without_weights
from stages.models.mtp_weights import ATTRIBUTE, MtpNames, MtpWeights, find_mtp_weights

METRIC = "mtp_loss"
"""Name of the metric for the layer's cross-entropy in nats a token, before multiplication by its weight."""


class MultiTokenPrediction(nn.Module):
    """MTP layer: maps the last hidden states and the next tokens' embeddings to hidden states of the next tokens."""

    def __init__(self, layer: nn.Module, norm: nn.Module, width: int, names: MtpNames) -> None:
        """Create it on the meta device. layer, norm: of the model, whose structure is copied."""
        super().__init__()
        self.names = names
        self.embedding_norm, self.hidden_norm = _like(norm), _like(norm)
        self.projection = nn.Linear(2 * width, width, bias=False, device="meta")
        self.layer = _like(layer)
        self.norm = _like(norm)

    def forward(self, embedded: Tensor, hidden: Tensor, call: LayerCall) -> Tensor:
        """Return hidden states [rows, sequence, width] that predict the token after the next."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        output = self.layer(self.projection(both), *call.positional, **call.named)
        return self.norm(output[0] if isinstance(output, tuple) else output)


@dataclass
class LayerCall:
    """Arguments with which a decoder layer was called, besides the hidden states."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


def add_mtp(causal_lm: Any, folder: Path) -> None:
    """Add the MTP layer of a model folder to the model, on the meta device; raise ModelError if it cannot be built."""
    stored = weight_shapes(folder)
    weights = find_mtp_weights(stored, folder)
    layer, like, like_in_files = _layer_like(causal_lm, folder, weights, stored)
    width, norm = causal_lm.config.get_text_config().hidden_size, getattr(causal_lm.get_decoder(), "norm", None)
    expected = {part: (width, 2 * width) if part == "projection.weight" else (width,) for part in weights.parts}
    different = sorted(name for part, name in weights.parts.items() if stored[name] != expected[part])
    if different or not isinstance(norm, nn.Module):
        raise ModelError(
            f"`mtp_loss_weight`: {type(causal_lm).__name__} has no last norm that is known here, or {folder} holds "
            f"weights of multi-token prediction of another width than {width} ({', '.join(different) or 'none'}); "
            "remove it"
        )
    # In reverse, so that the embedding's own name comes last, which a tied head has too.
    names_of = {id(one): name for name, one in reversed([*causal_lm.named_parameters(remove_duplicate=False)])}
    shared = {"embedding": causal_lm.get_input_embeddings(), "head": causal_lm.get_output_embeddings()}
    copied = {name: names_of[id(shared[which].weight)] for name, which in weights.copies.items()}
    names = MtpNames(weights, like, like_in_files, copied)
    causal_lm.add_module(ATTRIBUTE, MultiTokenPrediction(layer, norm, width, names))


def _layer_like(causal_lm: Any, folder: Path, weights: MtpWeights, stored: Shapes) -> tuple[nn.Module, str, str]:
    """Return the model's last layer with the MTP layer's weights, and how their names begin in model and files."""
    wanted = {name: stored[f"{weights.layer}{name}"] for name in weights.of_layer}
    in_layers: dict[str, dict[str, tuple[int, ...]]] = {}  # by the beginning of names in files, such as model.layers.1.
    for name, shape in own_weight_shapes(causal_lm, folder).items():
        if match := re.match(r".*?\blayers\.\d+\.", name):
            in_layers.setdefault(match[0], {})[name.removeprefix(match[0])] = shape
    layers, prefixes = text_layers(causal_lm), {module: name for name, module in causal_lm.named_modules()}
    # Files may name a layer with another prefix than modules do, but by the same number. Towers have other weights.
    same = {int(beginning.split(".")[-2]): beginning for beginning, shapes in in_layers.items() if shapes == wanted}
    types = getattr(causal_lm.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    if len({types[number] for number in same}) != 1:
        raise ModelError(
            f"`mtp_loss_weight`: {len(same)} of the {len(layers)} layers of {type(causal_lm).__name__} have weights "
            f"like {weights.layer} in {folder}; expected some, all of one type, to build the layer of multi-token "
            "prediction as they are; remove `mtp_loss_weight`"
        )
    last = max(same)
    return layers[last], f"{prefixes[layers[last]]}.", same[last]


def check_mtp(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise ModelError if the model in a folder has no MTP layer that can be trained, from file headers alone."""
    causal_lm = model_without_weights(folder, trust_remote_code=trust_remote_code)
    causal_lm._weight_conversions = ModelFiles(folder, causal_lm).conversions
    add_mtp(causal_lm, folder)


def read_mtp(causal_lm: Any, files: ModelFiles, rows_of: RowsOf) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows of the MTP layer's weights that a process needs, by their names in the model, if it has one.

    The decoder layer's weights are read as if they were those of the layer that it is like.
    """
    if not hasattr(causal_lm, ATTRIBUTE):
        return
    names: MtpNames = getattr(causal_lm, ATTRIBUTE).names
    weights = names.weights
    as_like = files.renamed({f"{names.like_in_files}{name}": f"{weights.layer}{name}" for name in weights.of_layer})
    for name, rows in as_like.read(lambda name: rows_of(names.own(name))):
        yield names.own(name), rows
    with WeightFiles(files.folder) as stored:
        shapes = stored.shapes()
        for part, name in weights.parts.items():
            wanted = rows_of(f"{ATTRIBUTE}.{part}")
            if wanted is not None:
                is_empty = wanted.start == wanted.stop is not None  # of a weight with fewer rows than processes
                rows = torch.empty(0, *shapes[name][1:]) if is_empty else stored.read(name, wanted)
                yield f"{ATTRIBUTE}.{part}", rows


def one_ahead(batch: Batch) -> Batch:
    """Return a batch whose tokens and targets are those of the next position in the same document.

    At a document's last position the token is 0, and there is no target.
    """
    inputs, signal = batch.inputs, batch.signal
    ids = _next(inputs.input_ids, batch.documents, 0)
    targets = _next(signal.targets, batch.documents, IGNORED)
    return Batch(replace(inputs, input_ids=ids), replace(signal, targets=targets))


def num_targets(batches: Sequence[Batch], add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a global batch's number of targets, at least 1, float32. add_up: sums float64 over shares of the batch."""
    own = sum(len(batch.signal.target_positions) for batch in batches)
    return add_up(torch.tensor(own, dtype=torch.float64)).float().clamp(min=1) if batches else torch.ones(())


@contextmanager
def call_of_layer(causal_lm: Any) -> Iterator[LayerCall]:
    """Provide the arguments with which the layer that the MTP layer is like is called in this context."""
    call = LayerCall()

    def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        call.positional = positional[1:]
        call.named = {name: value for name, value in named.items() if name != "hidden_states"}

    layer = causal_lm.get_submodule(getattr(causal_lm, ATTRIBUTE).names.like.removesuffix("."))
    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield call
    finally:
        handle.remove()


def hidden_ahead(causal_lm: Any, hidden: Tensor, ahead: Batch, call: LayerCall) -> Tensor:
    """Return the MTP layer's hidden states [rows, sequence, width] from the model's last ones.

    ahead: of `one_ahead`. call: of the same forward pass.
    """
    into, back = rows_of_layers(decoder_of(causal_lm), ahead.inputs)
    embedded = causal_lm.get_input_embeddings()(ahead.inputs.input_ids)
    return back(getattr(causal_lm, ATTRIBUTE)(into(embedded), into(hidden), call))


def _next(values: Tensor, documents: Documents, fill: int) -> Tensor:
    """Return the value at the next position in the same document, int64 [rows, sequence]; `fill` at its last."""
    shifted = values.roll(-1, 1)
    is_last = documents.ids != documents.ids.roll(-1, 1)
    is_last[:, -1] = True
    return shifted.masked_fill(is_last, fill)


def _like(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are on the meta device and learn; buffers are copied."""
    # Through `deepcopy`'s memo, so that not one weight is copied.
    empty: dict[int, Any] = {id(one): nn.Parameter(torch.empty_like(one, device="meta")) for one in module.parameters()}
    return deepcopy(module, empty)
