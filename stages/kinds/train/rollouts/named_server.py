"""A server that samples, and that others started: it is checked before it is used, and never ended.

Weights reach it by a folder, which it must have under the same path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import LifecycleError, ServerError, TransientError
from stages.core.keys import key_in
from stages.core.redaction import redact
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.rollouts.prompts import most_tokens
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.engine import Engine
from stages.serving.registry import ENGINES

CHECK_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
WEIGHTS = "weights"
"""The folder in a stage's scratch by which weights go to a server."""


@dataclass(frozen=True)
class NamedServer:
    """See `stages.kinds.train.rollouts.server.Host` and `SamplingServer`.

    num_tokens: of a prompt and its completion, at most. dtype: in which it is to compute.
    """

    remedy: ClassVar[str] = "is waited for, and given the same weights again"
    engine: ClassVar[Engine] = ENGINES["vllm"]

    client: Client
    num_tokens: int
    dtype: str
    ready_timeout_s: float

    @classmethod
    def of(cls, config: TrainConfig, model_folder: Path) -> Self:
        """Raises RecipeError for a variable that is not set."""
        sampling = config.sampling
        assert sampling and sampling.server
        named, execution = sampling.server, config.execution
        key = key_in(named.key_variable, f"{config.sampling_block}.server.key_variable")
        url = named.url.rstrip("/").removesuffix("/v1")
        client = Client(url, key, named.served_model, execution.rollout_timeout_s)
        num_tokens = most_tokens(config, sampling, model_folder)
        return cls(client, num_tokens, sampling.dtype(config.precision), execution.ready_timeout_s)

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(named=self.client.url)

    @property
    def api_key(self) -> str:
        """To be sent as a bearer token."""
        return self.client.api_key

    def alive(self) -> bool:
        """Its process is not ours: whether it answers is all that is known."""
        return True

    def check(self, folder: Path | None = None) -> None:
        """Raise ServerError, saying how to start it, where it cannot be given weights or learned from; TransientError
        when it does not answer. folder: one of the file system by which the weights are to reach it.
        """
        try:
            self.engine.check_takes_weights(
                replace(self.client, timeout_s=CHECK_TIMEOUT_S), self.num_tokens, self.dtype
            )
            if folder:
                self.engine.check_reads(self.address, self.api_key, folder.resolve(), CHECK_TIMEOUT_S)
        except ServerError as error:  # what a server answers may repeat what it was sent
            raise ServerError(redact(str(error), [self.api_key] if self.api_key else [])) from None

    @contextmanager
    def opened(self, folder: Path, name: str) -> Iterator[Self]:
        """As soon as it answers."""
        since_s = time.monotonic()
        while not self.client.is_healthy():
            if time.monotonic() - since_s > self.ready_timeout_s:
                raise TransientError(
                    f"the server that samples, {self.client.url}, has not answered for {self.ready_timeout_s:g} s "
                    "(execution.ready_timeout_s); start it again"
                )
            time.sleep(POLL_INTERVAL_S)
        self.check()
        self.prepare(folder)
        self.engine.reload_weights(self.address, self.api_key, folder.resolve(), self.client.timeout_s)
        yield self

    def prepare(self, folder: Path) -> None:
        self.engine.prepare_reloads(folder, self.client)


def named_server_problems(
    config: TrainConfig, model_folder: Path, context: StageContext | None = None
) -> Iterator[LifecycleError]:
    """What is wrong with a server that the recipe names for sampling. context: of a run, whose folders it must read."""
    if not (config.sampling and config.sampling.server and is_main_process()):
        return
    try:
        NamedServer.of(config, model_folder).check(context.scratch / WEIGHTS / "none" if context else None)
    except TransientError as error:
        yield TransientError(f"{error}; start the server that samples, or correct `{config.sampling_block}.server.url`")
    except LifecycleError as error:
        yield error
