"""Checks a Hugging Face model folder in well under a second, before anything slow is started on it.

Reads headers and a few bytes of each weight: a folder that passes has a config that makes sense, complete safetensors
files and a tokenizer that goes with them. Whether the architecture can be built shows when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.models.config_check import check_config, check_generation_config, is_quantized, other_architecture
from stages.models.gguf_file import GGUF_FILE, check_gguf, holds_gguf
from stages.models.json_object import read_json_object
from stages.models.tokenizer_files import check_tokenizer_files, other_end
from stages.models.weight_files import WEIGHTS_FILE, WEIGHTS_INDEX, check_index, check_values, read_tensors

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def check_model_folder(folder: Path) -> list[str]:
    """What is unusual about the model in `folder`, but no error.

    Raises ModelError, naming the file and what to do, unless it is complete and safe and its parts go together.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; expected a folder with config.json and {WEIGHTS_FILE}")
    config = _check_config(folder)
    unusual = filter(None, [other_architecture(config)])
    checked = [*unusual, *_check_weights(folder, config), *check_tokenizer_files(folder, config)]
    return [*checked, *other_end(folder, config)]


def follow_file_mask(path: Path) -> None:
    """Let those read a file who may read others of this process: safetensors leaves its files to their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _check_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: it is no model saved by `save_pretrained`")
    config = read_json_object(path)
    if not config.get("model_type") and not config.get("architectures"):
        raise ModelError(f"{path} names neither `model_type` nor `architectures`: it is not the config of a model")
    check_config(config, str(path))
    generation = folder / "generation_config.json"
    if generation.is_file():
        check_generation_config(read_json_object(generation), config, str(generation))
    return config


def _check_weights(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
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
    _check_count(folder, config, sum(len(tensors[file]) for file in files))
    if not is_quantized(config):
        yield from check_values([tensor for file in sorted(files) for tensor in tensors[file]], config)


def _check_count(folder: Path, config: Mapping[str, Any], num_tensors: int) -> None:
    """A layer has several tensors. Building one of too many that a config asks for takes hours, or all memory."""
    text = config.get("text_config")
    num_layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers", 0)
    if num_layers > num_tensors:
        raise ModelError(
            f"{folder}/config.json says num_hidden_layers {num_layers}, but its files hold only {num_tensors} tensors; "
            "mend the config, or fetch the model again"
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
