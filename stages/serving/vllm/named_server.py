"""A vLLM that others started, and that is given weights: whether it can be, and how it is to be started.

What it says of itself and the weights that it loads go by way of its development routes (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from stages.core.errors import ServerError
from stages.core.redaction import shortened
from stages.remote.http_answers import AnswerModel
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.completions import Count
from stages.serving.vllm.swap import post

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs"
SAID_OF_ITSELF = "/server_info?config_format=json"
SAMPLED_AS_ASKED = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
"""Else a model's own generation_config.json has a say in what is sampled, and log-probabilities are not those of what
was sampled from."""


class _Settings(AnswerModel):
    dtype: str
    max_model_len: Count
    generation_config: str | None
    logprobs_mode: str | None


class _Device(AnswerModel):
    device: str


class _Configured(AnswerModel):
    settings: _Settings = Field(alias="model_config")  # the name belongs to pydantic
    device_config: _Device


class _ServerInfo(AnswerModel):
    vllm_config: _Configured


def check_takes_weights(client: Client, num_tokens: int, dtype: str) -> None:
    """Raise ServerError unless it can be given weights and learned from; TransientError when it does not answer.

    num_tokens: of a prompt and its answer. dtype: `float32` or `bfloat16`.
    """
    client.check_lists_model("the server", "; name one of these (`served_model`)")
    if problems := "; ".join(_problems(_configured(client).settings, num_tokens, dtype)):
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
    """Return whether the server computes on a CPU. Raises as `check_takes_weights` does."""
    return _configured(client).device_config.device == "cpu"


def _configured(client: Client) -> _Configured:
    """Ask the server for its settings."""
    try:
        return client.answer(SAID_OF_ITSELF, _ServerInfo).vllm_config
    except ServerError as error:
        raise ServerError(
            f"the server at {client.url} has no development routes, by which a vLLM (0.32) is given weights "
            f"({error}); start it with `{START}`, where none but trusted programs reach it: they run any method of it"
        ) from error


def _problems(its: _Settings, num_tokens: int, dtype: str) -> Iterator[str]:
    for name, needed in SAMPLED_AS_ASKED.items():
        if (value := getattr(its, name)) != needed:
            option = name.replace("_", "-")
            yield f"its {option} is {shortened(str(value), 50)}; start it with `--{option} {needed}`"
    if (its_dtype := shortened(its.dtype.removeprefix("torch."), 50)) != dtype:
        yield (
            f"it computes in {its_dtype}, where {dtype} is asked for; start it with `--dtype {dtype}`, or say "
            f"`serving.dtype: {its_dtype}`"
        )
    if its.max_model_len < num_tokens:
        yield (
            f"it takes {its.max_model_len} tokens of prompt and completion together, where there may be {num_tokens}; "
            f"start it with `--max-model-len {num_tokens}`, or say `serving.max_model_len: {its.max_model_len}`"
        )
