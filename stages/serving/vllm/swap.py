"""Other weights for a running vLLM, loaded at the socket where it listens: never by way of the proxy.

Each version of an adapter has a name and a folder of its own. Under a name that was used before, vLLM would answer from
the prefix cache of the former weights, or read the files again at every request. Whole weights come in the place of
those that it has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from stages.core.errors import ModelError, TransientError
from stages.core.files import write_atomically
from stages.core.redaction import shortened
from stages.remote.http_answers import Expected
from stages.serving.backend import EngineAddress, post_to_engine

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEAD_FILE = "head.safetensors"
ANSWER_BYTES = 2**20


def load_adapter(address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
    """Raises ServerError when vLLM refuses it, which harms nothing; TransientError when it does not answer in time."""
    body = {"lora_name": name, "lora_path": str(folder)}
    post(address, api_key, "v1/load_lora_adapter", body, f" {name}", timeout_s)


def unload_adapter(address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
    """Forget the name; its weights make room when another needs it. Raises as `load_adapter` does."""
    post(address, api_key, "v1/unload_lora_adapter", {"lora_name": name}, f" {name}", timeout_s)


def reload_weights(address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
    """In the place of the model's, those of `folder`, which `prepare_reloads` has seen; no request may be under way.

    Raises as `load_adapter` does, but where vLLM refuses, it ends at the next request.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    post(address, api_key, "collective_rpc", body, f" of {folder}", timeout_s)
    # A prompt that was seen before would be answered from the keys and values of the former weights.
    post(address, api_key, "reset_prefix_cache", {}, "", timeout_s)


def prepare_reloads(folder: Path) -> None:
    """Write the head of a model whose embedding serves as it, and say so in its config.

    vLLM on a CPU keeps the head in another order, and does not renew that when it is tied: new layers would answer
    through an old head. Raises ModelError for a model whose weights have other names than most have.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            if EMBEDDING in stored.keys():  # noqa: SIM118 (it is no mapping)
                save_file({HEAD: stored.get_tensor(EMBEDDING)}, folder / HEAD_FILE, {"format": "pt"})
                break
    else:
        raise ModelError(
            f"giving new weights to a running vLLM on a CPU: {folder} ties its head, and has no {EMBEDDING} to make "
            "one of; train it on GPUs, or untie its head"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"][HEAD] = HEAD_FILE
        write_atomically(index, json.dumps(content))
    write_atomically(folder / "config.json", json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def post(address: EngineAddress, api_key: str, route: str, body: dict[str, Any], what: str, timeout_s: float) -> None:
    """Ask vLLM for what a route does; what: with it, in messages. Raises as `load_adapter` does."""
    doing = f"{route.rpartition('/')[2]}{what}"
    expected = Expected(f"asking vLLM to {doing}: it", ANSWER_BYTES, timeout_s, key=api_key)
    try:
        post_to_engine(address, expected, route, [body])[0].check()
    except (OSError, aiohttp.ClientError) as error:
        cause = shortened(str(error), 200)
        raise TransientError(f"asking vLLM to {doing}: {type(error).__name__}: {cause}") from error
