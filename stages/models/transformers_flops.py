"""FLOPs of a model built by Transformers, counted from its parameters by the formulas in `flops`.

`ModelShape.flops` says the same from the sizes alone, but only for the families it knows.
"""

from typing import Any

from torch import nn

from stages.models.flops import AttentionWork, ModelFlops


def model_flops(model: Any, *, predicts_ahead: bool = False) -> ModelFlops:
    """Return the sizes that decide a Transformers model's FLOPs, from its global parameter shapes and its config.

    predicts_ahead: a module with one more layer predicts the token after the next, by the same head.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    expert_share = _routed_share(config)
    layer_parameters = frozen_parameters = 0.0
    for name, parameter in model.named_parameters():
        # Matrices alone. Embeddings are looked up, not multiplied; one that is tied to the head counts as the head.
        if parameter.ndim >= 2 and parameter is not head and id(parameter) not in lookups:
            seen = parameter.numel() * (expert_share if ".experts." in name else 1.0)
            layer_parameters += seen
            frozen_parameters += 0.0 if parameter.requires_grad else seen
    attention = _attention_work(config, predicts_ahead)
    head_parameters = head.numel() * (1 + predicts_ahead)
    return ModelFlops(layer_parameters, head_parameters, attention, frozen_parameters, not head.requires_grad)


def _routed_share(config: Any) -> float:
    """Return the share of the routed experts that each token uses; 1 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if not num_experts:
        return 1.0
    chosen = ("num_experts_per_tok", "top_k_experts")  # the latter is Gemma 4's
    return next(getattr(config, name) for name in chosen if getattr(config, name, None)) / num_experts


def _attention_work(config: Any, predicts_ahead: bool) -> tuple[AttentionWork, ...]:
    if not getattr(config, "num_attention_heads", None):  # Mamba keeps a state, whose operations are not counted
        return ()
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [every_layer] * num_layers
    widths = [_attention_width(config.per_layer_config[layer]) for layer in range(num_layers)]
    layers = list(zip(layer_types, widths, strict=True))
    layers += layers[-1:] * predicts_ahead
    full = sum(width for kind, width in layers if kind == "full_attention")
    windowed = sum(width for kind, width in layers if kind in ("sliding_attention", "chunked_attention"))
    return tuple(one for one in (AttentionWork(full, None), AttentionWork(windowed, window)) if one.width)


def _attention_width(layer: Any) -> int:
    """Return the width of queries and values of a layer, from its config: Gemma 4's heads have two widths."""
    head_width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    query_width = getattr(layer, "qk_head_dim", None) or head_width
    value_width = getattr(layer, "v_head_dim", None) or head_width
    return int(layer.num_attention_heads * (query_width + value_width))
