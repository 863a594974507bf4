"""Tiny models whose files hold a layer of multi-token prediction (MTP), which Transformers does not load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pipeline.test_quantize import save_model
from tests.zoo.models import tiny_model

WEIGHTS = "model.safetensors"
MTP_LAYER = {
    **dict.fromkeys(("glm4_moe", "deepseek_v3"), "model.layers.2."),
    "qwen3_5_text": "mtp.layers.0.",
}
"""Prefix of the names of the weights of the MTP layer, by model type; the models have two layers of their own."""


def save_with_mtp(model_type: str, folder: Path, **fields: Any) -> dict[str, Tensor]:
    """Save a tiny model with an MTP layer, in the names of its family; return the layer's weights by name.

    fields: other values of its config.
    """
    model = tiny_model(model_type, **fields)
    save_model(model, folder)
    weights, size = load_file(folder / WEIGHTS), model.config.hidden_size
    layer = MTP_LAYER[model_type]
    # The last layer has attention and experts in each of the families, as MTP layers do.
    mtp = {name.replace("model.layers.1.", layer): weights[name] for name in weights if "model.layers.1." in name}
    if layer.startswith("mtp."):
        mtp |= {"mtp.fc.weight": torch.randn(size, 2 * size)}
        norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    else:
        mtp |= {f"{layer}eh_proj.weight": torch.randn(size, 2 * size)}
        # As the published files have them: copies of the embedding and of the head.
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        mtp |= {f"{layer}{name}.weight": weights[f"{original}.weight"] for name, original in copies.items()}
        norms = tuple(f"{layer}{name}" for name in ("enorm", "hnorm", "shared_head.norm"))
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    mtp |= {f"{name}.weight": torch.rand(size) + 0.5 for name in norms}
    # Not the layer that they were copied from, and in another dtype than the model's.
    mtp = {name: (weight + torch.randn_like(weight) / 100).bfloat16() for name, weight in sorted(mtp.items())}
    save_file({**weights, **mtp}, folder / WEIGHTS, {"format": "pt"})
    return mtp
