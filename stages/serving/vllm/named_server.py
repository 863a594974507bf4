"""A vLLM that others started, and that is given weights: whether it can be, and how it is to be started.

What it says of itself and the weights that it loads go by way of its development routes (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.core.errors import ServerError
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.vllm.swap import post

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs"
SAID_OF_ITSELF = "/server_info?config_format=json"
SAMPLED_AS_ASKED = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
"""Else a model's own generation_config.json has a say in what is sampled, and log-probabilities are not those of what
was sampled from."""


def check_takes_weights(client: Client, num_tokens: int, dtype: str) -> None:
    """Raise ServerError unless it can be given weights and learned from; TransientError when it does not answer.

    num_tokens: of a prompt and its answer. dtype: `float32` or `bfloat16`.
    """
    if client.model not in (names := client.model_names()):
        raise ServerError(
            f"the server at {client.url} serves {', '.join(names)}, not {client.model}; name one of these "
            "(`served_model`)"
        )
    if problems := "; ".join(_problems(_configured(client)["model_config"], num_tokens, dtype)):
        raise ServerError(f"the server at {client.url}: {problems}")


def check_reads(address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
    """Write a file without weights to the folder, and have it loaded: of one that lacks some, vLLM would be left with
    half a model, unless the weights are said to be in its own order. Raises ServerError when it does not find the file.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({}, folder / "model.safetensors")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "is_checkpoint_format": False}}
    try:
        post(address, api_key, "collective_rpc", body, f" of {folder}", timeout_s)
    except ServerError as error:
        raise ServerError(
            f"{error}; the weights reach it by this folder, so it must have the same one under the same path: start it "
            "on this machine, or where the store's file system is mounted alike"
        ) from error


def runs_on_cpu(client: Client) -> bool:
    """Raises as `check_takes_weights` does."""
    return bool(_configured(client)["device_config"]["device"] == "cpu")


def _configured(client: Client) -> dict[str, Any]:
    """What it says of its settings."""
    try:
        found: dict[str, Any] = client.described(SAID_OF_ITSELF)["vllm_config"]
    except (ServerError, KeyError, TypeError) as error:
        raise ServerError(
            f"the server at {client.url} has no development routes, by which a vLLM (0.32) is given weights "
            f"({error}); start it with `{START}`, where none but trusted programs reach it: they run any method of it"
        ) from error
    return found


def _problems(configured: dict[str, Any], num_tokens: int, dtype: str) -> Iterator[str]:
    for name, wanted in SAMPLED_AS_ASKED.items():
        if (found := configured[name]) != wanted:
            option = name.replace("_", "-")
            yield f"its {option} is {found}; start it with `--{option} {wanted}`"
    if (its := configured["dtype"].removeprefix("torch.")) != dtype:
        yield (
            f"it computes in {its}, where {dtype} is asked for; start it with `--dtype {dtype}`, or say "
            f"`serving.dtype: {its}`"
        )
    if (most := configured["max_model_len"]) < num_tokens:
        yield (
            f"it takes {most} tokens of prompt and completion together, where there may be {num_tokens}; start it with "
            f"`--max-model-len {num_tokens}`, or say `serving.max_model_len: {most}`"
        )
