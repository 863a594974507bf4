"""A Hugging Face folder → a causal language model that gives log-probabilities of targets.

Rank 0 alone reads the weights (in fp32, the master precision); the other processes get an empty model of the same
shape, whose weights come over once every process holds its shards only (`parallelize.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from stages.core.errors import LifecycleError, ModelError
from stages.data.batch import IGNORED, Batch
from stages.engines.attention import hidden_states, prepare_attention
from stages.engines.log_probabilities import (
    LogitsTransform,
    greedy_tokens,
    likeliest_tokens,
    logits_transform,
    tempered,
    token_log_probabilities,
)
from stages.engines.rotary import long_from, rotate_by_document
from stages.models.loaded_weights import check_finite

PROBE_LENGTHS = (12, 7)
"""Tokens of two documents."""
PROBE_LONG_FROM = 8
"""Where rotary frequencies depend on the length, only the first of them is a long one."""
PROBE_TOLERANCE = 1e-3
"""Nats; fp32 kernels differ by some 1e-6, a forgotten scale or soft cap by much more."""


class TargetLogProbabilities(nn.Module):
    """A causal language model whose forward maps a batch to log-probabilities of its targets.

    It is the root of the FSDP tree, so that the head's weight is gathered while the log-probabilities are computed.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.transform: LogitsTransform | None = logits_transform(causal_lm.config)
        rotate_by_document(decoder_of(causal_lm))

    def forward(self, batch: Batch, *, greedy: bool = False, num_likeliest: int = 0) -> Tensor:
        """float32 [rows, sequence], 0 where there is no target, or [rows, sequence, 1 + k] with those of candidates;
        greedy: the likeliest tokens there, as int64; num_likeliest: see `likeliest_tokens`."""
        hidden = hidden_states(decoder_of(self.causal_lm), batch)
        head = self.causal_lm.get_output_embeddings()
        if greedy:
            return greedy_tokens(hidden, head, batch.targets)
        transform = tempered(self.transform, batch.temperature)
        if num_likeliest:
            return likeliest_tokens(hidden, head, batch.targets, num_likeliest, transform)
        # FSDP2 hangs its backward hooks on the output, and cannot rely on them when that is a view.
        return token_log_probabilities(hidden, head, batch.wanted, transform).squeeze(-1).clone()


def load_model(
    folder: Path, *, device: torch.device, reads_weights: bool, trust_remote_code: bool
) -> TargetLogProbabilities:
    """The model of a Hugging Face folder in fp32 on the CPU; its weights are undefined unless `reads_weights`.

    Raises ModelError when the folder cannot be loaded as a causal language model, when weights are missing in it, or
    when the model does something to its logits that `logits_transform` does not know.
    """
    disable_progress_bar()
    source = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **source)
        build = {"attn_implementation": prepare_attention(config, device), "dtype": torch.float32}
        if not reads_weights:
            return TargetLogProbabilities(_empty_model(config, trust_remote_code, build))
        causal_lm, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that `_check_complete` can name them
            **source,
            **build,
        )
        _check_complete(folder, found)
        _check_tied(folder, causal_lm)
        check_finite(folder, causal_lm.named_parameters())
        model = TargetLogProbabilities(causal_lm)
        _check_log_probabilities(model)
    except (LifecycleError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a folder that was never tried makes Transformers raise
        raise ModelError(
            f"loading {folder} as a causal language model: {type(error).__name__}: {error}; fetch the model again, or "
            "take one that Transformers can run"
        ) from error
    return model


def decoder_of(causal_lm: Any) -> Any:
    """The model without its head."""
    if causal_lm.base_model is not causal_lm:
        return causal_lm.base_model
    embedding = causal_lm.get_input_embeddings()  # Llama 4 names its decoder otherwise than its class says
    return next(child for child in causal_lm.children() if any(module is embedding for module in child.modules()))


def transformer_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order: what is gathered, recomputed and compiled one at a time."""
    layers: list[nn.Module] = []
    todo: list[nn.Module] = [causal_lm]
    while todo:
        module = todo.pop(0)
        if isinstance(module, GradientCheckpointingLayer) or _is_unsplittable(causal_lm, module):
            layers.append(module)
        else:
            todo += module.children()
    if not layers:
        raise ModelError(f"{type(causal_lm).__name__}: found no transformer layers to shard, recompute or compile")
    return layers


def _is_unsplittable(causal_lm: Any, module: nn.Module) -> bool:
    return type(module).__name__ in (getattr(causal_lm, "_no_split_modules", None) or ())


def _empty_model(config: Any, trust_remote_code: bool, build: dict[str, Any]) -> Any:
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **build)
    # Memory that is never touched costs nothing on the CPU; shards are cut from it before it is filled.
    causal_lm.to_empty(device="cpu")
    causal_lm.tie_weights()
    return causal_lm


def _check_complete(folder: Path, found: dict[str, Any]) -> None:
    missing = sorted(found["missing_keys"])
    mismatched = sorted(str(entry[0]) for entry in found["mismatched_keys"])
    if missing or mismatched:
        raise ModelError(
            f"loading {folder}: {len(missing)} weights are missing and {len(mismatched)} have another shape than "
            f"config.json says ({', '.join([*missing, *mismatched][:5])}); fetch or save the model again"
        )


def _check_tied(folder: Path, causal_lm: Any) -> None:
    """Transformers leaves a head that is in the files untied, whatever the config says; serving engines do not."""
    is_tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
    if causal_lm._tied_weights_keys and causal_lm.config.get_text_config().tie_word_embeddings and not is_tied:
        raise ModelError(
            f"loading {folder}: its config says `tie_word_embeddings: true`, or leaves it at that, but the files hold "
            "a head that is not the embedding; say false in config.json, or remove the head from the files"
        )


@torch.no_grad()
def _check_log_probabilities(model: TargetLogProbabilities) -> None:
    """Two packed documents must get the log-probabilities that Transformers gives to each of them alone."""
    causal_lm = model.causal_lm.eval()
    input_ids = torch.arange(sum(PROBE_LENGTHS)) % causal_lm.config.get_text_config().vocab_size
    documents = input_ids.split(PROBE_LENGTHS)
    targets = torch.cat([functional.pad(document[1:], (0, 1), value=IGNORED) for document in documents])
    positions = torch.cat([torch.arange(length) for length in PROBE_LENGTHS])
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(PROBE_LENGTHS))
    batch = Batch(input_ids[None], targets[None], positions[None], numbers[None], len(documents), PROBE_LENGTHS)
    with long_from(decoder_of(causal_lm), PROBE_LONG_FROM):
        found = model(batch)[0]
        expected = torch.cat([_log_probabilities_alone(causal_lm, document) for document in documents])
    difference = (found - expected).abs().max().item()
    if not difference < PROBE_TOLERANCE:
        raise ModelError(
            f"{type(causal_lm).__name__} gives other log-probabilities to packed documents than to each alone "
            f"(by {difference:.2g} nats): its attention, or what it does to its logits, is not known here; this "
            "architecture cannot be trained"
        )


def _log_probabilities_alone(causal_lm: Any, document: Tensor) -> Tensor:
    """float32 [tokens], with 0 for the last, by Transformers' own attention and head."""
    attn_implementation = causal_lm.config._attn_implementation
    causal_lm.set_attn_implementation("eager")
    logits = causal_lm(input_ids=document[None], use_cache=False).logits[0, :-1].float()
    causal_lm.set_attn_implementation(attn_implementation)
    return functional.pad(logits.log_softmax(-1).gather(1, document[1:, None]).squeeze(1), (0, 1))
