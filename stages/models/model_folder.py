"""Checks a Hugging Face model folder in well under a second, before anything slow is started on it.

Reads headers only: a folder that passes has a config, complete safetensors files and a tokenizer. Whether the weights
are the right ones shows when they are loaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.core.errors import ModelError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_model_folder(folder: Path, *, needs_tokenizer: bool = True) -> None:
    """Raise ModelError, naming the file and what to do, unless `folder` holds a complete and safe model."""
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; expected a folder with config.json and {WEIGHTS_FILE}")
    _check_config(folder / "config.json")
    _check_weights(folder)
    if needs_tokenizer:
        _check_tokenizer(folder)


def follow_file_mask(path: Path) -> None:
    """Let those read a file who may read others of this process: safetensors leaves its files to their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _check_config(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no config.json: it is no model saved by `save_pretrained`")
    config = _read_json_object(path)
    if not config.get("model_type") and not config.get("architectures"):
        raise ModelError(f"{path} names neither `model_type` nor `architectures`: it is not the config of a model")


def _check_weights(folder: Path) -> None:
    tensors = {path.name: _tensor_names(path) for path in sorted(folder.glob("*.safetensors"))}
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        _check_index(index, tensors)
    elif WEIGHTS_FILE not in tensors:
        raise ModelError(_why_no_weights(folder, sorted(tensors)))


def _tensor_names(path: Path) -> set[str]:
    """Names of the tensors of a file whose header agrees with the file's size."""
    try:
        with safe_open(path, framework="np") as weights:
            names = set(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or incomplete ({path.stat().st_size} bytes): {error}; fetch or save this file again"
        ) from error
    if not names:
        raise ModelError(f"{path} holds no tensors; fetch or save this file again")
    return names


def _check_index(index: Path, tensors: dict[str, set[str]]) -> None:
    """Every tensor that the index promises must be in the file that it names."""
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no `weight_map` (tensor → file); fetch or save it again")
    for tensor, file in weight_map.items():
        if file not in tensors:
            raise ModelError(f"{index} says that {tensor} is in {file}, which is missing; fetch that file")
        if tensor not in tensors[file]:
            raise ModelError(f"{index} says that {tensor} is in {file}, but it is not: the two are of different models")


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


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files into it"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_json_object(folder / name)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; fetch or save this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object; fetch or save this file again")
    return content
