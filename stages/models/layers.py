"""Parts of a causal language model: decoder, transformer layers and their kinds, and what text never reaches."""

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.core.errors import ModelError


class WithoutHead:
    """Model that sees, and whose class has no part with all but the output head (Llama 4): it runs without its head."""

    def __init__(self, causal_lm: Any) -> None:
        self._causal_lm = causal_lm
        self.config, self.forward, self.modules = causal_lm.config, causal_lm.forward, causal_lm.modules

    def __call__(self, **arguments: Any) -> tuple[Any, ...]:
        """Return the last hidden states, which the model takes for logits."""
        head = self._causal_lm.get_output_embeddings()
        head.forward = lambda states: states  # an attribute of the instance, before that of the class
        try:
            return (self._causal_lm(**arguments).logits,)
        finally:
            del head.forward


def decoder_of(causal_lm: Any, *, sees: bool = False) -> Any:
    """Return the decoder of a causal language model, without its output head. sees: with its tower of pictures."""
    if causal_lm.base_model is not causal_lm:
        return causal_lm.base_model
    if sees:
        return WithoutHead(causal_lm)
    embedding = causal_lm.get_input_embeddings()  # Llama 4's class names another attribute
    return next(child for child in causal_lm.children() if any(module is embedding for module in child.modules()))


def parts_for_text(causal_lm: Any) -> list[nn.Module]:
    """Return the modules that text passes through: the whole model, or decoder and head beside towers of images."""
    if causal_lm.config.get_text_config() is causal_lm.config:
        return [causal_lm]
    return [causal_lm.get_decoder(), causal_lm.get_output_embeddings()]


def freeze_unused(causal_lm: Any) -> None:
    """Freeze parts that text does not pass through (a vision tower), which only weight decay would change."""
    used = {id(one) for part in parts_for_text(causal_lm) for one in part.parameters()}
    for parameter in causal_lm.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def transformer_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the model's transformer layers in order, the units that FSDP2 gathers, recomputes and compiles."""
    layers: list[nn.Module] = []
    todo: list[nn.Module] = [causal_lm]
    while todo:
        module = todo.pop(0)
        # Not searched further: a layer inside a layer is sharded with the outer one.
        if isinstance(module, GradientCheckpointingLayer) or _is_unsplittable(causal_lm, module):
            layers.append(module)
        else:
            todo += module.children()
    if not layers:
        raise ModelError(f"{type(causal_lm).__name__}: found no transformer layers to shard, recompute or compile")
    return layers


def text_layers(causal_lm: Any) -> list[nn.Module]:
    """Return the transformer layers that text passes through, in order; those of towers are left out."""
    of_text = {module for part in parts_for_text(causal_lm) for module in part.modules()}
    return [layer for layer in transformer_layers(causal_lm) if layer in of_text]


def keep_kinds_of_layers(causal_lm: Any) -> None:
    """Keep only a model's first layers, at least two and enough to show every kind (types, sizes, settings).

    Towers of other modalities stay whole: text does not run through them.
    """
    config = causal_lm.config.get_text_config()
    layers = text_layers(causal_lm)
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [(signature(layer), kind) for layer, kind in zip(layers, types, strict=True)]
    holders = [one for one in causal_lm.modules() if isinstance(one, nn.ModuleList) and list(one) == layers]
    for holder in holders:
        # `index` is a kind's first layer; the largest of these is the last layer that shows a new kind.
        del holder[max(2, 1 + max(map(kinds.index, kinds))) :]
        config.num_hidden_layers = len(holder)


def signature(layer: nn.Module) -> tuple[str, list[tuple[str, str, Any]]]:
    """Return a layer's modules, and their simple attributes except the layer's index, to compare kinds of layers."""
    return repr(layer), [
        (prefix, name, value)
        for prefix, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and "idx" not in name  # `layer_idx` differs everywhere
    ]


def _is_unsplittable(causal_lm: Any, module: nn.Module) -> bool:
    return type(module).__name__ in (getattr(causal_lm, "_no_split_modules", None) or ())
