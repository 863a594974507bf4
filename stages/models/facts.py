"""Facts of a model from its `config.json`, as Transformers 4 or 5 wrote it; needs no torch and no Transformers."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from stages.core.errors import ModelError
from stages.core.files import read_json_object
from stages.models.shape import ModelShape

CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Names of the files that describe a processor; a folder without any is of a model that reads text alone."""
LARGEST_SIZE = 2**53
"""Upper limit of sizes in a model's config; floating-point numbers above it are not exact."""
ROTARY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
GPT_FAMILIES = ("gpt2", "opt", "bloom", "mpt")
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_neo", "gpt_bigcode", "biogpt", "xglm", "openai-gpt")
"""Model families with a learned table of positions, which cannot read texts longer than that table."""
OPT_POSITION_OFFSET = 2
"""Number of unused rows at the start of OPT's table of positions."""

SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "ffn_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_experts": ("num_local_experts", "num_experts"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""Spellings of config fields in several model families, by the field of `ModelShape` that takes the value."""


class ModelFacts:
    """Facts of a model from its `config.json`, read once; properties raise ModelError if it is no JSON object."""

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        """Create the facts of a model from `source`: a model folder, a `config.json`, or its content."""
        self._source = source

    @property
    def folder(self) -> Path:
        assert isinstance(self._source, Path), "a config alone, without a folder"
        return self._source

    @cached_property
    def config(self) -> Mapping[str, Any]:
        if not isinstance(self._source, Path):
            return self._source
        return read_json_object(self._source / CONFIG_FILE if self._source.is_dir() else self._source)

    @cached_property
    def processor_files(self) -> Mapping[str, Any]:
        """Contents of the files of the model's processor of pictures by their names; {} for one that reads text."""
        if not isinstance(self._source, Path) or not self._source.is_dir():
            return {}
        paths = [path for name in PROCESSOR_FILES if (path := self._source / name).is_file()]
        return {path.name: read_json_object(path) for path in paths}

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the model's config; in a multimodal model, those of its text part override the others.

        But the whole model ties its head, or does not.
        """
        text = self.config.get("text_config")
        if not isinstance(text, Mapping):
            return self.config
        whole = {name: self.config[name] for name in ("tie_word_embeddings",) if name in self.config}
        return {**self.config, **text, **whole}

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model's (text) part; raise ModelError for an unknown family, and missing or invalid fields."""
        family = self.fields.get("model_type")
        if family in ROTARY_FAMILIES:
            return _rotary(family, self.fields)
        if family in GPT_FAMILIES:
            return _gpt(family, self.fields)
        known = ", ".join((*ROTARY_FAMILIES, *GPT_FAMILIES))
        raise ModelError(f"reading the model's config: model_type is {family!r}; sizes are known for {known}")

    @property
    def max_positions(self) -> int | None:
        """Length in tokens of the longest text that the model was made for; None if the config does not say."""
        return _optional(self.fields, "max_positions")

    @property
    def vocabulary_size(self) -> int | None:
        """Vocabulary size, which is the number of rows of the embedding; None if the config does not say."""
        size = self.fields.get("vocab_size")
        return size if is_size(size) else None

    @property
    def quantization(self) -> Any:
        """Quantization of the weights, from the config or its text part; None if they are plain floating-point."""
        parts = [part for part in (self.config, self.config.get("text_config")) if isinstance(part, Mapping)]
        found = (part.get(name) for part in parts for name in ("quantization_config", "compression_config"))
        return next((value for value in found if value), None)


def is_size(value: Any) -> TypeGuard[int]:
    """Return whether a value of a config can be a size: a whole number above 0 that floating-point can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST_SIZE


def rotates_by_length(rope_type: str) -> bool:
    """Return whether rotary frequencies of a rope type (Transformers' name) differ between short and long texts."""
    return "dynamic" in rope_type or rope_type == "longrope"


def _rotary(family: str, fields: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of a model like Llama from its config: rotary positions, RMSNorm, SwiGLU, grouped queries."""
    hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_heads")
    attention_bias = bool(fields.get("attention_bias", False))
    # Qwen's configs name a window that is off by default; Mistral's have no such switch.
    windowed = fields.get("use_sliding_window", family in ("mistral", "mixtral"))
    return ModelShape(
        num_layers=_size(fields, "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or _head_dim(hidden_size, num_heads),
        ffn_size=_size(fields, "ffn_size"),
        vocab_size=_size(fields, "vocab_size"),
        family=family,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",  # Qwen2's config does not say so
        output_bias=attention_bias,
        ffn_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=fields.get("sliding_window") if windowed else None,
        max_positions=_optional(fields, "max_positions"),
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        **_mixture(family, fields),
    )


def _mixture(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    num_layers, num_experts = _size(fields, "num_layers"), _size(fields, "num_experts")
    width = _size(fields, "ffn_size") if family == "mixtral" else _required(fields, ("moe_intermediate_size",))
    step, dense = fields.get("decoder_sparse_step") or 1, set(fields.get("mlp_only_layers") or ())
    # Layers step - 1, 2 step - 1, … route tokens, as Transformers counts.
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return {
        "num_experts": num_experts,
        "experts_per_token": _required(fields, ("num_experts_per_tok",)),
        "expert_ffn_size": width,
        "router_normalizes": family == "mixtral" or bool(fields.get("norm_topk_prob", False)),
        "dense_layers": frozenset(dense),
    }


def _gpt(family: str, fields: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of a model like GPT-2: LayerNorm, two feed-forward matrices, tied embeddings."""
    hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_heads")
    has_bias = family != "mpt" or not fields.get("no_bias", True)
    max_positions = _optional(fields, "max_positions")
    positions = {"gpt2": max_positions or 0, "opt": (max_positions or 0) + OPT_POSITION_OFFSET}
    return ModelShape(
        num_layers=_size(fields, "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(hidden_size, num_heads),
        ffn_size=_optional(fields, "ffn_size") or int(fields.get("expansion_ratio", 4) * hidden_size),
        vocab_size=_size(fields, "vocab_size"),
        family=family,
        tied_embeddings=bool(fields.get("tie_word_embeddings", True)),
        gated_ffn=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        ffn_bias=has_bias,
        norm_bias=has_bias,
        embedding_norm=family == "bloom",
        num_position_embeddings=positions.get(family, 0),
        max_positions=max_positions,
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
        has_split_plan=False,
        packs=family in positions,  # the others' biases by distance (ALiBi) are in no fused attention
    )


def _size(fields: Mapping[str, Any], name: str) -> int:
    return _required(fields, SPELLINGS[name])


def _optional(fields: Mapping[str, Any], name: str) -> int | None:
    spelling = next((spelling for spelling in SPELLINGS[name] if fields.get(spelling) is not None), None)
    return None if spelling is None else _required(fields, (spelling,))


def _required(fields: Mapping[str, Any], spellings: tuple[str, ...]) -> int:
    """Return a config field under its first spelling; raise ModelError unless it is a positive integer."""
    spelling = next((spelling for spelling in spellings if fields.get(spelling) is not None), None)
    if spelling is None:
        raise ModelError(f"reading the model's config: {' or '.join(spellings)} is missing")
    value = fields[spelling]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"reading the model's config: {spelling} is {value!r}; expected a positive whole number")
    return value


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(
            f"reading the model's config: hidden size {hidden_size} is not divisible by {num_heads} attention heads, "
            "and no head_dim is given"
        )
    return hidden_size // num_heads
