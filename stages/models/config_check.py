"""What makes no sense in a model's `config.json`, whatever the architecture, before anything is built from it. Pure.

Transformers meets such values with an AssertionError deep in a layer, or not at all. What an architecture asks for
beyond this is for Transformers to say, and what the planner asks for is for `model_config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from stages.core.errors import ModelError

SIZES = {
    "num_hidden_layers", "n_layer", "n_layers", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head",
    "n_heads", "vocab_size",
}  # fmt: skip
"""Positive whole numbers in every config that has them."""
OPTIONAL_SIZES = {
    "num_key_value_heads", "head_dim", "intermediate_size", "ffn_dim", "n_inner", "max_position_embeddings",
    "n_positions",
}  # fmt: skip
"""So are these, but null means a default, and some architectures have a list, one for each layer."""
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}
"""So are these, and 0 means that there are none, as in the dense ones of Granite's hybrids."""
NUMBERS = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"}
"""Numbers above 0; null means a default."""
ROTARY = ("rope_scaling", "rope_parameters")
ROTARY_NUMBERS = ("factor", "rope_theta", "original_max_position_embeddings")
DTYPES = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "half", "float", "double"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NUM_NAMED = 5
LARGEST_SIZE = 2**53
"""What is larger is no size of anything, and no floating-point number either."""


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError, naming every field and its value, unless the config read from `where` can be a model's."""
    problems = list(_problems(config))
    text = config.get("text_config") or {}
    if isinstance(text, Mapping):
        problems += [f"text_config.{problem}" for problem in _problems(text)]
    else:
        problems.append(f"text_config is {text!r}, expected an object")
    if problems:
        more = f" and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
        raise ModelError(f"{where}: {'; '.join(problems[:NUM_NAMED])}{more}; mend this file or fetch it again")


def code_not_run(config: Mapping[str, Any], *, trusted: bool) -> str | None:
    """What to say of a model that brings Python files which nobody runs, since the recipe does not trust them."""
    if not config.get("auto_map") or trusted:
        return None
    return (
        "the model's config names Python files of its own (auto_map), which are not run: Transformers' own code "
        "for its model_type is. If you trust them, set trust_remote_code: true"
    )


def other_architecture(config: Mapping[str, Any]) -> str | None:
    """What to say of a model whose class does not go with its type: Transformers goes by one, vLLM by the other.

    Classes are named after their type, but for a few types of many names, which may be warned of without need.
    """
    model_type, classes = str(config.get("model_type") or ""), config.get("architectures") or []
    family = _letters(model_type.removesuffix("_text"))
    if not classes or config.get("auto_map") or any(_letters(name).startswith(family) for name in classes):
        return None
    return (
        f"model_type is {model_type}, but architectures is {', '.join(classes)}: training goes by model_type, "
        "and vLLM by architectures; mend the one that is wrong"
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def check_generation_config(generation: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError when the tokens that end an answer are not in the model's vocabulary."""
    if problems := list(_token_ids(generation, vocabulary_size(config))):
        raise ModelError(f"{where}: {'; '.join(problems)}; mend this file or fetch it again")


def check_unquantized(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for a model whose weights are quantized: they cannot be learned, nor quantized again."""
    if found := _quantization(config):
        method = found.get("quant_method", "unknown method") if isinstance(found, Mapping) else found
        raise ModelError(f"{where} is quantized already ({method}); take the model that it was made from")


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether the weights are stored as something else than plain floating-point numbers."""
    return bool(_quantization(config))


def _quantization(config: Mapping[str, Any]) -> Any:
    """What a config says of it, of a multimodal model also that of its text part."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    found = (part.get(name) for part in parts for name in ("quantization_config", "compression_config"))
    return next((one for one in found if one), None)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding; None where the config does not say."""
    text = config.get("text_config")
    size = text.get("vocab_size") if isinstance(text, Mapping) else config.get("vocab_size")
    return size if _is_size(size) else None


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("model_type", "architectures"):
        value, expected = config.get(name), (str if name == "model_type" else list)
        if value is not None and not (isinstance(value, expected) and all(isinstance(one, str) for one in value)):
            yield f"{name} is {value!r}, expected a {'name' if expected is str else 'list of names'}"
    for name in sorted(SIZES & config.keys()):
        if not _is_size(config[name]):
            yield f"{name} is {config[name]!r}, expected a positive whole number"
    for name in sorted((OPTIONAL_SIZES | EXPERTS) & config.keys()):
        values = config[name] if isinstance(config[name], list) else [config[name]]
        none = (None, 0) if name in EXPERTS else (None,)
        if not all(_is_size(value) or any(value is one for one in none) for value in values):
            yield f"{name} is {config[name]!r}, expected a positive whole number"
    yield from _rotary(config)
    if not isinstance(tied := config.get("tie_word_embeddings"), bool | None):
        yield f"tie_word_embeddings is {tied!r}, expected true or false"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if _is_size(heads) and _is_size(groups) and heads % groups:
        yield f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}"
    yield from _dtypes(config)
    yield from _token_ids(config, vocabulary_size(config))


def _dtypes(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        known = isinstance(value, Mapping) or str(value).removeprefix("torch.") in DTYPES  # one for each part
        if value is not None and not known:
            yield f"{name} is {value!r}, expected one of {', '.join(sorted(DTYPES))}"


def _rotary(config: Mapping[str, Any]) -> Iterator[str]:
    """Also what is wrong with the other numbers that must be above 0."""
    numbers = {name: config[name] for name in sorted(NUMBERS & config.keys())}
    for name in ROTARY:
        if not isinstance(value := config.get(name) or {}, Mapping):
            yield f"{name} is {value!r}, expected an object"
        else:
            numbers |= {f"{name}.{key}": value[key] for key in ROTARY_NUMBERS if key in value}
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, int | float) and number > 0):
            yield f"{name} is {number!r}, expected a number above 0"


def _token_ids(config: Mapping[str, Any], size: int | None) -> Iterator[str]:
    for name in TOKEN_IDS:
        for token in config[name] if isinstance(config.get(name), list) else [config.get(name)]:
            if token is None or (name == "pad_token_id" and token == -1):
                continue  # -1 stands for none in old Llama models
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                yield f"{name} is {token!r}, expected a token's number"
            elif size is not None and token >= size:
                yield f"{name} {token} is beyond the vocabulary of {size} tokens"


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST_SIZE
