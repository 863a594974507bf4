"""Checks of a Hugging Face model folder in well under a second, before anything slow starts on it.

By headers and a few bytes of each weight: a sound config, complete safetensors files (or a GGUF file) and a tokenizer
whose tokens the model has. Transformers meets bad values with an AssertionError deep in a layer, or not at all. What an
architecture requires beyond this shows when it is loaded.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.core.files import read_json_object
from stages.core.redaction import quoted
from stages.models.facts import CONFIG_FILE, ModelFacts, is_size
from stages.models.weight_files import WEIGHTS_FILE, WEIGHTS_INDEX, check_index, check_values, read_tensors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
SPECIAL = ("bos_token", "eos_token", "pad_token")
NUM_NAMED_TOKENS = 3
SIZES = {
    "num_hidden_layers", "n_layer", "n_layers", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head",
    "n_heads", "vocab_size",
}  # fmt: skip
"""Config fields that are positive whole numbers in every config that has them."""
OPTIONAL_SIZES = {
    "num_key_value_heads", "head_dim", "intermediate_size", "ffn_dim", "n_inner", "max_position_embeddings",
    "n_positions",
}  # fmt: skip
"""Config fields that are positive whole numbers, null for a default, or a list with one for each layer."""
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}
"""Config fields for numbers and widths of experts: integers, 0 for none (Granite's dense hybrids), null, or a list."""
MOST_LAYERS = 2048
"""Largest number of layers, in any part of a model, that is planned or built: no model has more."""
DEEPEST_PART = 4
"""Number of objects in each other to which a config is searched for parts that have layers."""
NUMBERS = {"rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"}
"""Config fields that are numbers above 0, or null for a default."""
ROTARY = ("rope_scaling", "rope_parameters")
ROTARY_NUMBERS = ("factor", "rope_theta", "original_max_position_embeddings")
DTYPES = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "half", "float", "double"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NUM_NAMED = 5
GGUF_FILE = "model.gguf"
GGUF_MAGIC = b"GGUF"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def check_model_folder(facts: ModelFacts) -> list[str]:
    """Check the config, weights and tokenizer in a model folder, and return warnings about them.

    Raises ModelError, naming the file and what to do, unless it is complete and safe and its parts go together.
    """
    folder = facts.folder
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; expected a folder with config.json and {WEIGHTS_FILE}")
    _check_configs(facts)
    unusual = filter(None, [other_architecture(facts.config)])
    checked = [*unusual, *_check_weights(facts), *_check_tokenizer_files(facts)]
    return [*checked, *_other_end(facts)]


def follow_file_mask(path: Path) -> None:
    """Give a file the permissions of the process's umask. Safetensors makes its files readable by the owner alone."""
    # A process can read its mask only by setting another one.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _check_configs(facts: ModelFacts) -> None:
    path = facts.folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{facts.folder} has no config.json: it is no model saved by `save_pretrained`")
    if not facts.config.get("model_type") and not facts.config.get("architectures"):
        raise ModelError(f"{path} names neither `model_type` nor `architectures`: it is not the config of a model")
    check_config(facts, str(path))
    generation = facts.folder / "generation_config.json"
    if generation.is_file() and (problems := list(_token_ids(read_json_object(generation), facts.vocabulary_size))):
        raise ModelError(f"{generation}: {'; '.join(problems)}; correct this file or fetch it again")


def _check_weights(facts: ModelFacts) -> Iterator[str]:
    folder = facts.folder
    if holds_gguf(folder):
        check_gguf(folder / GGUF_FILE)
        return
    tensors = {path.name: read_tensors(path) for path in sorted(folder.glob("*.safetensors"))}
    if (folder / WEIGHTS_INDEX).is_file():
        files = check_index(folder, tensors)
    elif WEIGHTS_FILE in tensors:
        files = {WEIGHTS_FILE}
    else:
        raise ModelError(_why_no_weights(folder, sorted(tensors)))
    _check_count(facts, sum(len(tensors[file]) for file in files))
    if not facts.quantization:
        yield from check_values([tensor for file in sorted(files) for tensor in tensors[file]], facts.fields)


def _check_count(facts: ModelFacts, num_tensors: int) -> None:
    """Raise ModelError if the config has more layers, slow and large to build, than the files have tensors."""
    num_layers = facts.fields.get("num_hidden_layers", 0)
    if num_layers > num_tensors:
        raise ModelError(
            f"{facts.folder}/config.json says num_hidden_layers {num_layers}, but its files hold only {num_tensors} "
            "tensors; correct the config, or fetch the model again"
        )


def _why_no_weights(folder: Path, other_files: list[str]) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds pickled weights only ({', '.join(pickles)}), and loading those can run any code; "
            "convert them with a current Transformers (`save_pretrained`), or take a revision with safetensors"
        )
    if "adapter_model.safetensors" in other_files:
        return f"{folder} holds an adapter, not a model; merge it into its base model first"
    found = f", only {', '.join(other_files)}" if other_files else ""
    return f"{folder} has no weights: expected {WEIGHTS_FILE}, or shards with {WEIGHTS_INDEX}{found}"


def files_with_weights(folder: Path) -> list[Path]:
    """Return the weight files of a model's or an adapter's folder, in any format."""
    return sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".gguf"))


def holds_gguf(folder: Path) -> bool:
    """Return whether a model folder's weights are in a GGUF file; one beside safetensors files does not count."""
    return (folder / GGUF_FILE).is_file() and not any(folder.glob("*.safetensors"))


def check_gguf(path: Path) -> None:
    """Raise ModelError for a file that does not begin like a GGUF file; loading finds later faults."""
    with path.open("rb") as stream:
        found = stream.read(len(GGUF_MAGIC))
    if found != GGUF_MAGIC:
        raise ModelError(f"{path} begins with {found!r}, expected {GGUF_MAGIC!r}: it is no GGUF file; make it again")


def check_config(facts: ModelFacts, where: str) -> None:
    """Raise ModelError, naming every bad field and its value, unless a config of the file `where` can be a model's."""
    problems = list(_problems(facts.config))
    text = facts.config.get("text_config") or {}
    if isinstance(text, Mapping):
        problems += [f"text_config.{problem}" for problem in _problems(text)]
    else:
        problems.append(f"text_config is {text!r}, expected an object")
    problems += _too_deep(facts.config)
    if problems:
        more = f" and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
        raise ModelError(f"{where}: {'; '.join(problems[:NUM_NAMED])}{more}; correct this file or fetch it again")


def check_unquantized(facts: ModelFacts, where: str) -> None:
    """Raise ModelError for a model with quantized weights, which can neither be trained nor quantized again."""
    if found := facts.quantization:
        method = found.get("quant_method", "unknown method") if isinstance(found, Mapping) else found
        raise ModelError(f"{where} is quantized already ({method}); take the model that it was made from")


def code_not_run(facts: ModelFacts, *, trusted: bool) -> str | None:
    """Return a warning if a model's own Python files are not run because the recipe does not trust them; else None."""
    if not facts.config.get("auto_map") or trusted:
        return None
    return (
        "the model's config names Python files of its own (auto_map), which are not run: Transformers' own code "
        "for its model_type is. If you trust them, set trust_remote_code: true"
    )


def other_architecture(config: Mapping[str, Any]) -> str | None:
    """Return a warning if a config's `architectures` belong to another `model_type`; else None.

    Transformers goes by the type, vLLM by the class, mostly named after it; else the warning may be needless.
    """
    model_type, classes = str(config.get("model_type") or ""), config.get("architectures") or []
    family = _letters(model_type.removesuffix("_text"))  # gemma3_text: Gemma3ForCausalLM
    if not classes or config.get("auto_map") or any(_letters(name).startswith(family) for name in classes):
        return None
    return (
        f"model_type is {model_type}, but architectures is {', '.join(classes)}: training goes by model_type, "
        "and vLLM by architectures; correct the one that is wrong"
    )


def _check_tokenizer_files(facts: ModelFacts) -> Iterator[str]:
    """Yield warnings about the tokenizer's files; ModelError if they are missing, damaged, or have unknown tokens."""
    folder, size = facts.folder, facts.vocabulary_size
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files into it"
        )
    files = ("tokenizer.json", "tokenizer_config.json")
    tokenizer, about = (read_json_object(folder / name) if (folder / name).is_file() else {} for name in files)
    if size is None:
        return
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry)}
    ordinary = {token: number for token, number in _vocabulary(tokenizer).items() if token not in added}
    special = {str(_text(about.get(name))) for name in SPECIAL}
    # Other added tokens may lie beyond the embedding as long as no text has them: a warning is enough.
    needed = {**ordinary, **{token: number for token, number in added.items() if token in special}}
    if beyond := _beyond(needed, size):
        raise ModelError(
            f"the tokenizer in {folder} has {len(beyond)} tokens beyond the model's vocabulary of {size} "
            f"({_named(beyond)}); it is another model's, or the embedding has to be enlarged"
        )
    if beyond := _beyond(added, size):
        yield (
            f"the tokenizer has {len(beyond)} added tokens beyond the model's vocabulary of {size} ({_named(beyond)}): "
            "no text may hold them"
        )


def _other_end(facts: ModelFacts) -> Iterator[str]:
    """Yield a warning if the tokenizer's end-of-text token does not stop generation in the model's settings."""
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    paths = [facts.folder / name for name in files]
    tokenizer, about, generation = (read_json_object(path) if path.is_file() else {} for path in paths)
    token = _text(about.get("eos_token"))
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry)}
    number = {**_vocabulary(tokenizer), **added}.get(token) if isinstance(token, str) else None
    where = "generation_config.json" if generation.get("eos_token_id") is not None else "config.json"
    ends = _listed((generation if where == "generation_config.json" else facts.config).get("eos_token_id"))
    if number is None or ends == [None] or number in ends:
        return
    names = {id_: text for text, id_ in {**_vocabulary(tokenizer), **added}.items() if id_ in ends}
    stops = ", ".join(f"{quoted(names[end], 40)} ({end})" if end in names else str(end) for end in ends)
    yield (
        f"the tokenizer ends texts with {quoted(token, 40)} ({number}; `eos_token` in tokenizer_config.json), and "
        f"generation stops at {stops} (`eos_token_id` in {where}): a model that learns plain texts learns an end at "
        "which no server stops; correct the file that is wrong"
    )


def end_tokens(folder: Path) -> frozenset[int]:
    """Return the tokens at which servers stop, as the model's config and generation settings name them."""
    files = [folder / name for name in ("config.json", "generation_config.json")]
    named = [_listed(read_json_object(file).get("eos_token_id")) for file in files if file.is_file()]
    return frozenset(token for tokens in named for token in tokens if isinstance(token, int))


def tokens_of(folder: Path) -> dict[str, int] | None:
    """Return the tokens in a folder's `tokenizer.json` with their numbers; None where it has no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = read_json_object(file)
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or () if _is_token(entry)}
    return {**_vocabulary(tokenizer), **added}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("model_type", "architectures"):
        value, expected = config.get(name), (str if name == "model_type" else list)
        if value is not None and not (isinstance(value, expected) and all(isinstance(one, str) for one in value)):
            yield f"{name} is {value!r}, expected a {'name' if expected is str else 'list of names'}"
    for name in sorted(SIZES & config.keys()):
        if not is_size(config[name]):
            yield f"{name} is {config[name]!r}, expected a positive whole number"
    for name in sorted((OPTIONAL_SIZES | EXPERTS) & config.keys()):
        values = config[name] if isinstance(config[name], list) else [config[name]]
        none = (None, 0) if name in EXPERTS else (None,)
        # `is`, since False == 0.
        if not all(is_size(value) or any(value is one for one in none) for value in values):
            yield f"{name} is {config[name]!r}, expected a positive whole number"
    yield from _rotary(config)
    if not isinstance(tied := config.get("tie_word_embeddings"), bool | None):
        yield f"tie_word_embeddings is {tied!r}, expected true or false"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if is_size(heads) and is_size(groups) and heads % groups:
        yield f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}"
    yield from _dtypes(config)
    yield from _token_ids(config, ModelFacts(config).vocabulary_size)


def _too_deep(config: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping) and inside.count(".") < DEEPEST_PART:
            yield from _too_deep(value, f"{inside}{name}.")
        elif name.endswith(("layers", "n_layer")) and is_size(value) and value > MOST_LAYERS:
            yield f"{inside}{name} is {value}, expected at most {MOST_LAYERS}"


def _dtypes(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        known = isinstance(value, Mapping) or str(value).removeprefix("torch.") in DTYPES  # one for each part
        if value is not None and not known:
            yield f"{name} is {value!r}, expected one of {', '.join(sorted(DTYPES))}"


def _rotary(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors for rotary settings in a config, and for other numbers that must be above 0."""
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


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token in a tokenizer's vocabulary. A Unigram model lists its tokens by id."""
    model = tokenizer.get("model")
    found = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(found, list):
        return {str(entry[0]): number for number, entry in enumerate(found) if isinstance(entry, list) and entry}
    return {token: number for token, number in (found or {}).items() if isinstance(number, int)}


def _is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _beyond(tokens: Mapping[str, int], size: int) -> dict[str, int]:
    return {token: number for token, number in tokens.items() if number >= size}


def _named(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{token!r} is {number}" for token, number in list(tokens.items())[:NUM_NAMED_TOKENS])
