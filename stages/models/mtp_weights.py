"""Weights of a layer of multi-token prediction (MTP) in a model's files, by the two published ways to name them.

Such a layer predicts the token after the next: it norms the embedding of the next token and the model's last hidden
state, projects both, joined, to the model's width, and runs one more decoder layer and a norm of its own; embedding and
output head are the model's (DeepSeek-V3, 2024, section 2.2).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stages.core.errors import ModelError
from stages.models.carried_weights import MTP_LAYER, mtp_names

Shared = Literal["embedding", "head"]
"""Weight of the model that an MTP layer uses."""

MODULE = "mtp."
NUM_NAMED = 3


@dataclass(frozen=True)
class MtpWeights:
    """Names in model files of an MTP layer's weights."""

    parts: Mapping[str, str]
    """Name in files of each weight beside the decoder layer's: both norms of the inputs, the projection, the norm."""
    layer: str
    """Beginning of the names of the decoder layer's weights, such as `mtp.layers.0.`."""
    of_layer: frozenset[str]
    """Names of the decoder layer's weights without that beginning."""
    copies: Mapping[str, Shared] = field(default_factory=dict)
    """Copies of the model's embedding and output head that files hold for the MTP layer, by their names."""


def find_mtp_weights(names: Collection[str], folder: object) -> MtpWeights:
    """Return the names of the MTP layer's weights among all names of weights in a model folder.

    Raises ModelError if there is no such layer, several, or one whose weights have other names.
    """
    of_mtp = mtp_names(names)
    if not of_mtp:
        raise ModelError(
            f"`mtp_loss_weight` trains a layer of multi-token prediction (MTP), and {folder} holds none; remove it, or "
            "take a model whose files have one"
        )
    layers = {match["layer"] for name in of_mtp if (match := MTP_LAYER.match(name))}
    weights = None
    if len(layers) < 2:
        weights = _among_layers(of_mtp, layers.pop()) if layers else _in_a_module(of_mtp)
    if weights is None:
        raise ModelError(
            f"`mtp_loss_weight`: {folder} holds multi-token prediction in a form that is not known here "
            f"({len(of_mtp)} weights, such as {', '.join(sorted(of_mtp)[:NUM_NAMED])}); expected one layer, as Qwen "
            "names it (mtp.fc, mtp.layers.0) or as DeepSeek and GLM do (eh_proj beside the weights of a layer); remove "
            "it, and these weights are copied as they are"
        )
    return weights


def _in_a_module(names: set[str]) -> MtpWeights | None:
    """Return the weights if a module `mtp` holds them (Qwen3-Next, Qwen3.5)."""
    parts = {
        "embedding_norm.weight": f"{MODULE}pre_fc_norm_embedding.weight",
        "hidden_norm.weight": f"{MODULE}pre_fc_norm_hidden.weight",
        "projection.weight": f"{MODULE}fc.weight",
        "norm.weight": f"{MODULE}norm.weight",
    }
    return _whole(names, parts, f"{MODULE}layers.0.", {})


def _among_layers(names: set[str], layer: str) -> MtpWeights | None:
    """Return the weights if they follow the model's own layers as one more (DeepSeek-V3, GLM-4.5)."""
    parts = {
        "embedding_norm.weight": f"{layer}enorm.weight",
        "hidden_norm.weight": f"{layer}hnorm.weight",
        "projection.weight": f"{layer}eh_proj.weight",
        "norm.weight": f"{layer}shared_head.norm.weight",
    }
    copies: dict[str, Shared] = {
        f"{layer}embed_tokens.weight": "embedding",
        f"{layer}shared_head.head.weight": "head",
    }
    return _whole(names, parts, layer, {name: shared for name, shared in copies.items() if name in names})


def _whole(names: set[str], parts: dict[str, str], layer: str, copies: dict[str, Shared]) -> MtpWeights | None:
    """Return the weights if there are all parts, and all others are the decoder layer's."""
    others = names - {*parts.values()} - copies.keys()
    if not names >= {*parts.values()} or not others or not all(name.startswith(layer) for name in others):
        return None
    return MtpWeights(parts, layer, frozenset(name.removeprefix(layer) for name in others), copies)


ATTRIBUTE = "mtp"
"""Name of the MTP layer's module in a Transformers model that trains one."""


@dataclass(frozen=True)
class MtpNames:
    """Names of an MTP layer's weights in the model that trains it, beside those in the files."""

    weights: MtpWeights
    like: str
    """Beginning of the names, in the model, of the weights of the layer that the MTP layer's is like."""
    like_in_files: str
    """Beginning of these weights' names in the files."""
    copied: Mapping[str, str]
    """Name in the model of the weight that each of the files' copies is of."""

    def own(self, name: str) -> str:
        """Return the name in the model of the MTP layer's weight which is like a layer's weight."""
        return f"{ATTRIBUTE}.layer.{name.removeprefix(self.like)}"

    def as_like(self, name: str) -> str | None:
        """Return the name of the layer's weight that an MTP layer's weight is like; None if it is like none."""
        inner = name.removeprefix(f"{ATTRIBUTE}.layer.")
        return None if inner == name else f"{self.like}{inner}"

    def in_files(self, name: str) -> str:
        """Return the name in files of the MTP layer's weight, from that of the layer's weight which it is like."""
        return f"{self.weights.layer}{name.removeprefix(self.like_in_files)}"

    def part_in_files(self, name: str) -> str | None:
        """Return the name in files of an MTP layer's weight beside its decoder layer; None for other weights."""
        return self.weights.parts.get(name.removeprefix(f"{ATTRIBUTE}."))
