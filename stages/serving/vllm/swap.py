"""Replacement of adapters and whole models in a running vLLM, by requests to vLLM itself instead of through the proxy.

Each version of an adapter has a name and a folder of its own: under a used name, vLLM would answer from the prefix
cache of the former weights, or read the files again at every request. Whole weights replace those that it has. A server
that others started is asked about itself, and gets its weights, by vLLM's development routes
(`VLLM_SERVER_DEV_MODE=1`).
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from pydantic import Field

from stages.core.errors import ModelError, ServerError, TransientError
from stages.core.files import write_atomically
from stages.core.redaction import shortened
from stages.models.facts import ModelFacts
from stages.models.processor_files import reads_media
from stages.remote.http import AnswerModel, Expected
from stages.serving.backend import EngineAddress, post_to_engine
from stages.serving.client import Client, Count
from stages.serving.engine import SleepingPart
from stages.serving.vllm.adapters import EDGES, MAX_RANKS

EMBEDDING = re.compile(r"(?P<head>.*?)model\.(?:language_model\.)?embed_tokens\.weight")
"""Names of the embedding of tokens in files, after which that of the head follows."""
HEAD_FILE = "head.safetensors"
ANSWER_BYTES = 2**20
LOAD_ADAPTER = "v1/load_lora_adapter"
NUM_SLOTS = 2
"""Fewest adapters that a vLLM must hold at once: the last slot answers for the base (`adapters.py`)."""


START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs"
SAID_OF_ITSELF = "/server_info?config_format=json"
SAMPLED_AS_ASKED = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
"""vLLM settings without which a server's samples and log-probabilities cannot be used for training.

By default the model's generation_config.json changes what is sampled, and log-probabilities are of another
distribution."""


def load_adapter(address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
    """Load a LoRA adapter; raise ServerError if vLLM refuses it, harmlessly, TransientError for no answer."""
    body = {"lora_name": name, "lora_path": str(folder)}
    post(address, api_key, LOAD_ADAPTER, body, f" {name}", timeout_s)


def unload_adapter(address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
    """Unload an adapter from a running vLLM server by its name. Raises as `load_adapter` does."""
    post(address, api_key, "v1/unload_lora_adapter", {"lora_name": name}, f" {name}", timeout_s)


def reload_weights(address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
    """Replace the model's weights in a running vLLM by those in `folder`, which `prepare_reloads` has prepared.

    No request may be running. Raises as `load_adapter`; where vLLM refuses, it ends at the next request.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    post(address, api_key, "collective_rpc", body, f" of {folder}", timeout_s)
    # A prompt that was seen before would be answered from the keys and values of the former weights.
    post(address, api_key, "reset_prefix_cache", {}, "", timeout_s)
    if reads_media(folder):  # and a picture, with what the former tower made of it
        post(address, api_key, "reset_encoder_cache", {}, "", timeout_s)


def sleep(address: EngineAddress, api_key: str, timeout_s: float, *, keeps_weights: bool) -> None:
    """Let a running vLLM free its devices' memory until `wake_up`; raises as `load_adapter`.

    keeps_weights: copies them to the host's memory (vLLM's level 1); else they are lost (level 2), as its KV cache is.
    A build for CPUs keeps its memory, and only stops answering.
    """
    query = {"level": "1" if keeps_weights else "2"}
    post(address, api_key, "sleep", {}, "", timeout_s, query=query)


def wake_up(address: EngineAddress, api_key: str, part: SleepingPart, timeout_s: float) -> None:
    """Let a sleeping vLLM take device memory for its weights or its KV cache again; raises as `load_adapter`.

    With both it answers requests again. Weights that were lost are not there before `reload_weights`.
    """
    post(address, api_key, "wake_up", {}, f" for its {part}", timeout_s, query={"tags": part})


def prepare_reloads(folder: Path) -> None:
    """Untie a model's output head from its embedding on disk, so that vLLM can load new weights while it runs.

    On a CPU it keeps the head in another order, which it does not renew when tied: new layers would answer through an
    old head. Raises ModelError for a model whose weights have other names than most have.
    """
    facts = ModelFacts(folder)
    config = facts.config
    if not facts.fields.get("tie_word_embeddings"):
        return
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            if heads := tied_heads(stored.keys()):
                ((head, embedding),) = heads.items()
                save_file({head: stored.get_tensor(embedding)}, folder / HEAD_FILE, {"format": "pt"})
                break
    else:
        raise ModelError(
            f"giving new weights to a running vLLM on a CPU: {folder} ties its head, and has no embedding under a "
            "known name (model.embed_tokens.weight) to make one of; train it on GPUs, or untie its head"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"][head] = HEAD_FILE
        write_atomically(index, json.dumps(content))
    # Last: with the untied config, a folder needs the head that was written above.
    untied: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(text := config.get("text_config"), dict):
        untied["text_config"] = {**text, **untied}
    write_atomically(folder / "config.json", json.dumps({**config, **untied}, indent=2))


def tied_heads(names: Iterable[str]) -> dict[str, str]:
    """Return the name that a head in a file of its own would have, with that of the embedding it is tied to."""
    matches = filter(None, map(EMBEDDING.fullmatch, names))
    return {f"{match['head']}lm_head.weight": match[0] for match in matches}


def post(
    address: EngineAddress,
    api_key: str,
    route: str,
    body: dict[str, Any],
    what: str,
    timeout_s: float,
    query: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Post to one of vLLM's own routes; raises as `load_adapter` does. what: follows the route's name in messages."""
    doing = f"{route.rpartition('/')[2]}{what}"
    expected = Expected(f"asking vLLM to {doing}: it", ANSWER_BYTES, timeout_s, key=api_key)
    try:
        post_to_engine(address, expected, route, [body], query)[0].check()
    except (OSError, aiohttp.ClientError) as error:
        cause = shortened(str(error), 200)
        raise TransientError(f"asking vLLM to {doing}: {type(error).__name__}: {cause}") from error


def check_takes_weights(client: Client, num_tokens: int, dtype: str) -> None:
    """Raise ServerError unless a vLLM that the user started can take new weights and sample for training.

    Raises TransientError for no answer. num_tokens: of prompt and answer. dtype: `float32` or `bfloat16`.
    """
    client.check_lists_model("the server", "; name one of these (`served_model`)")
    if problems := "; ".join(_problems(_configured(client).settings, num_tokens, dtype)):
        raise ServerError(f"the server at {client.url}: {problems}")


def check_takes_adapters(client: Client, rank: int, modules: Collection[str]) -> None:
    """Raise ServerError unless a vLLM that the user started loads adapters of this LoRA rank on these kinds of layers.

    modules: such as `q_proj`; none where only the adapter's files will tell. Raises TransientError for no answer.
    """
    address = EngineAddress(named=client.url)
    asked = Expected(f"the server at {client.url}", ANSWER_BYTES, client.timeout_s, key=client.api_key)
    problems = [*_lora_problems(_configured(client).lora_config, rank, modules)]
    # Without names it loads nothing, and says so if it has the route at all.
    (answer,) = post_to_engine(address, asked, LOAD_ADAPTER, [{"lora_name": "", "lora_path": ""}])
    if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        problems.append("it loads no adapters while it runs; set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 where it starts")
    if problems:
        raise ServerError(f"the server at {client.url}: {'; '.join(problems)}")


def check_reads(address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
    """Raise ServerError unless a running vLLM can read files that we write to `folder`: one without weights is loaded.

    `is_checkpoint_format: False` (weights in vLLM's own order): a checkpoint that lacks some would leave half a model.
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
            "on this machine, or where the store's file system is mounted at the same path"
        ) from error


def runs_on_cpu(client: Client) -> bool:
    """Return whether a vLLM server that the user started runs on a CPU. Raises as `check_takes_weights` does."""
    return _configured(client).device_config.device == "cpu"


class _Settings(AnswerModel):
    dtype: str
    max_model_len: Count
    generation_config: str | None
    logprobs_mode: str | None


class _Device(AnswerModel):
    device: str


class _Adapters(AnswerModel):
    max_lora_rank: Count
    max_loras: Count
    kinds: list[str] | None = Field(alias="target_modules")  # of layers, such as `q_proj`


class _Configured(AnswerModel):
    settings: _Settings = Field(alias="model_config")  # the name belongs to pydantic
    device_config: _Device
    lora_config: _Adapters | None = None


class _ServerInfo(AnswerModel):
    vllm_config: _Configured


def _configured(client: Client) -> _Configured:
    """Return the settings that a running vLLM server reports, such as its dtype and context length."""
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


def _lora_problems(has: _Adapters | None, rank: int, modules: Collection[str]) -> Iterator[str]:
    if rank > MAX_RANKS[-1]:
        yield f"vLLM takes adapters of rank {MAX_RANKS[-1]} at most; lower `adapter.rank`, from {rank}"
        return
    needed = next(size for size in MAX_RANKS if size >= rank)
    layers = " ".join(sorted(modules)) or "LAYERS (the adapted kinds of layers, such as q_proj, and not the head)"
    if has is None:
        yield (
            f"it takes no adapters; start it with `--enable-lora --max-loras {NUM_SLOTS} --max-lora-rank {needed} "
            f"--lora-target-modules {layers}`"
        )
        return
    if has.max_lora_rank < rank:
        yield f"it takes adapters of rank {has.max_lora_rank} at most; start it with `--max-lora-rank {needed}`"
    if has.max_loras < NUM_SLOTS:
        yield (
            f"it holds {has.max_loras} adapter, and answered for its base by that; start it with `--max-loras "
            f"{NUM_SLOTS}`"
        )
    targets = None if has.kinds is None else {*has.kinds}
    if targets is None or targets & EDGES:
        yield (
            "its head may have an adapter, and two questions about a prompt would end it; start it with "
            f"`--lora-target-modules {layers}`"
        )
    elif lacking := sorted({*modules} - targets):
        yield (
            f"it would leave {', '.join(lacking)} without their adapter, and say nothing; start it with "
            f"`--lora-target-modules {layers}`"
        )
