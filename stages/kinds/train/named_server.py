"""Sampling server that a recipe names: its client, and whether it answers prompts with pictures."""

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


def client_of(config: TrainConfig) -> Client:
    """Return the client of the server that the recipe names; raise RecipeError for an unset environment variable."""
    assert config.sampling and config.sampling.server
    named = config.sampling.server
    key = key_in(named.key_variable, f"{config.sampling_block}.server.key_variable")
    return Client(
        named.url.rstrip("/").removesuffix("/v1"), key, named.served_model, config.execution.rollout_timeout_s
    )


def check_takes_pictures(config: TrainConfig) -> None:
    """Raise a LifecycleError unless the server that the recipe names answers prompts with pictures; on rank 0."""
    if is_main_process():
        client = replace(client_of(config), timeout_s=CHECK_TIMEOUT_S)
        ENGINE.check_takes_pictures(EngineAddress(named=client.url), client)
