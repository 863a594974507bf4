"""Sampling servers that a recipe names: their clients, and whether they answer prompts with pictures."""

from dataclasses import replace

from stages.core.contract import is_main_process
from stages.kinds.train.config import TrainConfig
from stages.remote.http import key_in
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.engine import Engine
from stages.serving.registry import ENGINES

ENGINE: Engine = ENGINES["vllm"]
CHECK_TIMEOUT_S = 60.0


def clients_of(config: TrainConfig) -> list[Client]:
    """Return the clients of the servers that the recipe names; raise RecipeError for an unset environment variable."""
    assert config.sampling and config.sampling.server
    named = config.sampling.server
    key = key_in(named.key_variable, f"{config.sampling_block}.server.key_variable")
    timeout_s = config.execution.rollout_timeout_s
    return [Client(url.rstrip("/").removesuffix("/v1"), key, named.served_model, timeout_s) for url in named.urls]


def check_takes_pictures(config: TrainConfig) -> None:
    """Raise a LifecycleError unless the servers that the recipe names answer prompts with pictures; on rank 0."""
    if is_main_process():
        for named in clients_of(config):
            client = replace(named, timeout_s=CHECK_TIMEOUT_S)
            ENGINE.check_takes_pictures(EngineAddress(named=client.url), client)
