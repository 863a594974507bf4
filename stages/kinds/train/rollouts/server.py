"""Sampling server of a training run: its start or connection, weight updates, checks and restarts.

When it dies or hangs, what is under way is asked again of its successor, which gets the same weights.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, Self

from stages.core.contract import SYNCED_WEIGHTS, StageContext, is_main_process
from stages.core.errors import LifecycleError, ServerError, TransientError
from stages.core.redaction import redact
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.named_server import CHECK_TIMEOUT_S, ENGINE, clients_of
from stages.kinds.train.rollouts.documents import AnsweredPrompt, most_tokens
from stages.models.facts import ModelFacts
from stages.models.recorded import Predicted
from stages.rollouts.asking import Answer, Request, ask_all
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.engine import Engine as ServingEngine
from stages.serving.engine import SleepingPart, WeightConnection
from stages.serving.held_weights import HeldWeights

MOST_RESTARTS = 3
"""Largest number of restarts of a sampling server in a row, without a completed sampling between them."""
ENDING = "the training ends, and its sampling with it"
POLICY = "policy"
"""Name under which the sampling server serves the trained model."""


class SamplingServer(Protocol):
    """Protocol of a running sampling server that takes new weights.

    address: of the serving engine itself. connection: by which it gets weights that are held in memory; None: it gets
    folders. alive: whether its process runs, as far as that is known.
    """

    @property
    def client(self) -> Client: ...
    @property
    def engine(self) -> ServingEngine: ...
    @property
    def address(self) -> EngineAddress: ...
    @property
    def api_key(self) -> str: ...
    @property
    def connection(self) -> WeightConnection | None: ...

    def alive(self) -> bool: ...


class ServerProvider(Protocol):
    """Provider of the sampling server (protocol).

    remedy: what is done about a failed server, in messages. is_adapter: whether an adapter on a frozen base learns.
    """

    @property
    def remedy(self) -> str: ...
    @property
    def is_adapter(self) -> bool: ...
    @property
    def transfer(self) -> str | None:
        """Way in which its server gets weights that are held in memory; None: it gets folders."""

    def name_of(self, folder: Path) -> str:
        """Return the name under which a server serves the weights in `folder`.

        Each version of an adapter has its own: vLLM's prefix cache goes by name and path, so that one that was loaded
        in place gave answers of the former (off by 0.5 nats).
        """

    def opened(self, folder: Path) -> AbstractContextManager[SamplingServer]:
        """Open a sampling server with the weights in `folder`.

        Raises ServerError when no server comes up, TransientError when none answers in time.
        """

    def load(self, server: SamplingServer, folder: Path, before: Path | None) -> None:
        """Load the weights in a folder, which `prepare` has prepared, into a running server instead of the former.

        Raises as `opened` does.
        """

    def prepare(self, folder: Path) -> None:
        """Prepare a folder of weights, in place, for a running sampling server; raise as `opened` does."""


class PolicyServer(Protocol):
    """Protocol of what samples from the model in training, as rank 0 uses it: a server, or several of one model."""

    def take(self, folder: Path) -> None: ...
    def take_held(self, held: HeldWeights) -> None: ...
    def forget(self) -> None: ...
    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None: ...
    def rest(self) -> None: ...
    def predictions(self, documents: Sequence[AnsweredPrompt]) -> Iterator[tuple[str, list[Predicted]]]:
        """Yield a name for messages of each server, and its log-probabilities of all tokens of documents."""

    def give_up(self) -> None: ...
    def close(self) -> None: ...


class RolloutServer:
    """Sampling server as rank 0 uses it: opens with the first weights, is restarted on failure, must be closed.

    sleeps: it shares its devices with training; between `rest` and the next `take` it holds no memory of theirs.
    """

    def __init__(
        self,
        host: ServerProvider,
        execution: TrainExecution,
        warn: Callable[[str], None],
        *,
        sleeps: bool = False,
    ) -> None:
        self._host = host
        self._execution, self._concurrent = execution, execution.concurrent_requests
        self._warn = warn
        self._sleeps = sleeps
        self._stack = ExitStack()
        self._server: SamplingServer | None = None
        self._folder: Path | None = None
        self._held: HeldWeights | None = None
        """Weights newer than those in the folder, from which a server starts."""
        self._restarts = 0
        self._is_given_up = False

    def take(self, folder: Path) -> None:
        """Load the weights in `folder` and remove the former folder; no request may be under way.

        Raises ServerError when no server comes up, TransientError when it fails repeatedly.
        """
        before, self._folder = self._folder, folder
        self._replace(lambda server: self._load(server, folder, before))
        if before:
            # Only now: vLLM may read the files of an adapter again as long as it is loaded.
            shutil.rmtree(before, ignore_errors=True)

    def take_held(self, held: HeldWeights) -> None:
        """Give the server weights that are held in memory, and close the former; raises as `take` does."""
        self.forget()
        self._held = held
        self._replace(lambda server: _connection(server).give(held))

    def forget(self) -> None:
        """Free the memory that holds weights for a restart; a running server has them."""
        if self._held:
            self._held.close()
            self._held = None

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        """Send requests to the sampling server, and call `keep` with the number, the request and the response of each.

        Raises ServerError for a request that is refused, TransientError when the server fails repeatedly.
        """
        remaining = dict(requests)

        def kept(number: int, request: Request, answer: Answer) -> None:
            if self._is_given_up:
                raise TransientError(ENDING)
            keep(number, request, answer)
            # from here on the answer is kept, and a restart does not ask for it again
            del remaining[number]

        while remaining:
            server, client = self._running, self._client
            named = [(number, {**request, "model": client.model}) for number, request in remaining.items()]
            try:
                ask_all(client, named, self._concurrent, kept, stall_s=client.timeout_s, server=server)
            except (ServerError, TransientError) as error:
                # A healthy server refused the request itself; its successor would refuse it, too.
                if isinstance(error, ServerError) and server.alive() and server.client.is_healthy():
                    raise
                self._restart(error)
        if not self._sleeps:
            self._restarts = 0

    def rest(self) -> None:
        """Let the server free the devices that it shares with training, if it shares them; no request may be under way.

        One that does not is ended, and started again by `take`. Raises TransientError when it fails repeatedly.
        """
        if not self._sleeps or self._server is None:
            return
        server, timeout_s = self._server, self._execution.rollout_timeout_s
        try:
            # An adapter's base is not given to the server again, and whole weights are.
            server.engine.sleep(server.address, server.api_key, timeout_s, keeps_weights=self._host.is_adapter)
        except (ServerError, TransientError) as error:
            self._end(error)
        else:
            self._restarts = 0

    def predictions(self, documents: Sequence[AnsweredPrompt]) -> Iterator[tuple[str, list[Predicted]]]:
        """Yield "the server", and its log-probabilities of all tokens of documents.

        Raises TransientError if it fails repeatedly.
        """
        while True:
            try:
                rows = predictions_of(self._running, self._client, documents)
            except (ServerError, TransientError) as error:
                self._restart(error)
            else:
                yield "the server", rows
                return

    def give_up(self) -> None:
        """Make `ask`, in another thread, fail at its next answer, and start no server again."""
        self._is_given_up = True

    def close(self) -> None:
        self._stop()
        self.forget()

    def _stop(self) -> None:
        self._stack.close()
        self._server = None

    @property
    def _running(self) -> SamplingServer:
        assert self._server, "weights are taken before anything is asked"
        return self._server

    @property
    def _client(self) -> Client:
        client = self._running.client
        assert self._folder
        model = self._host.name_of(self._folder) if self._host.is_adapter else client.model
        return replace(client, model=model, timeout_s=self._execution.rollout_timeout_s)

    def _replace(self, load: Callable[[SamplingServer], None]) -> None:
        """Wake the server up with new weights, or start one that has them; start another if that fails."""
        try:
            if self._server is None:
                self._start()
            else:
                # Weights before the KV cache: while they are read, their files' content is in memory, too.
                self._wake_up(self._server, "weights")
                load(self._server)
                self._wake_up(self._server, "kv_cache")
        except (ServerError, TransientError) as error:
            if self._server is None:
                raise
            self._restart(error)

    def _load(self, server: SamplingServer, folder: Path, before: Path | None) -> None:
        self._host.prepare(folder)
        self._host.load(server, folder, before)

    def _wake_up(self, server: SamplingServer, part: SleepingPart) -> None:
        if self._sleeps:
            server.engine.wake_up(server.address, server.api_key, part, self._execution.rollout_timeout_s)

    def _restart(self, error: LifecycleError) -> None:
        self._end(error)
        self._start()

    def _end(self, error: LifecycleError) -> None:
        """End a server that failed; raise TransientError if it has failed too often in a row."""
        if self._is_given_up:
            raise error
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            reason = f"the server that samples failed {self._restarts} times in a row: {error}"
            raise TransientError(reason, died=not self._running.alive()) from error
        self._warn(f"the server that samples {self._host.remedy}: {error}")
        self._stop()

    def _start(self) -> None:
        assert self._folder
        with ExitStack() as stack:
            server = stack.enter_context(self._host.opened(self._folder))
            if self._held:
                _connection(server).give(self._held)
            # The server is up: `close` ends it from here on. If opening failed, `stack` has ended it already.
            self._stack = stack.pop_all()
        self._server = server


def predictions_of(server: SamplingServer, client: Client, documents: Sequence[AnsweredPrompt]) -> list[Predicted]:
    """Return a server's log-probabilities of all tokens of documents; raise ServerError or TransientError."""
    of_text = [one.prompt + one.completion for one in documents if not one.pictures]
    seen = [one.pictures.seen(one.prompt, one.completion) for one in documents if one.pictures]
    rows = iter(client.predictions(of_text) if of_text else ())
    pictured = iter(server.engine.seeing_predictions(server.address, client, seen) if seen else ())
    return [next(pictured if one.pictures else rows) for one in documents]


def _connection(server: SamplingServer) -> WeightConnection:
    assert server.connection, "weights are held for servers that get them so"
    return server.connection


POLL_INTERVAL_S = 1.0


@dataclass(frozen=True)
class ExternalServer:
    """Sampling server that others started, checked before use and never ended; a `ServerProvider` and `SamplingServer`.

    It reads weights from a folder, under the same path. num_tokens: most of a prompt and its completion. rank: highest
    LoRA rank of the adapter that learns on the server's own weights; None: whole weights do. stage, run: with which
    names of adapters begin, since other stages, and a killed run of this one, may have left theirs.
    """

    remedy: ClassVar[str] = "is waited for, and given the same weights again"
    engine: ClassVar[ServingEngine] = ENGINE
    transfer: ClassVar[None] = None
    connection: ClassVar[None] = None

    client: Client
    num_tokens: int
    dtype: str
    ready_timeout_s: float
    rank: int | None = None
    stage: str = ""
    run: str = ""

    @classmethod
    def all_of(cls, config: TrainConfig, model: ModelFacts, version: str = "") -> list[Self]:
        """Return the sampling servers that the recipe names. version: of the stage that trains.

        Raises RecipeError for an unset environment variable.
        """
        sampling = config.sampling
        assert sampling
        num_tokens, dtype = most_tokens(config, sampling, model), sampling.dtype(config.precision)
        rank = config.adapter.highest_rank if config.adapter else None
        options = (num_tokens, dtype, config.execution.ready_timeout_s, rank, version[:12], secrets.token_hex(3))
        return [cls(client, *options) for client in clients_of(config)]

    @property
    def is_adapter(self) -> bool:
        return self.rank is not None

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(named=self.client.url)

    @property
    def api_key(self) -> str:
        """API key of the sampling server, sent as a bearer token."""
        return self.client.api_key

    def alive(self) -> bool:
        """Return True always, since the process of a server that others started cannot be watched."""
        return True

    def check(self, folder: Path | None = None) -> None:
        """Check that the server can load new weights from `folder`, and that its answers have what a loss needs.

        Raises ServerError, with the command that starts it right; TransientError when it does not answer.
        """
        try:
            self.engine.check_takes_weights(
                replace(self.client, timeout_s=CHECK_TIMEOUT_S), self.num_tokens, self.dtype
            )
            if self.rank:
                self.engine.check_takes_adapters(self.client, self.rank)
            if folder:
                self.engine.check_reads(self.address, self.api_key, folder.resolve(), CHECK_TIMEOUT_S)
        except ServerError as error:  # what a server answers may repeat what it was sent
            raise ServerError(redact(str(error), [self.api_key] if self.api_key else [])) from None

    def name_of(self, folder: Path) -> str:
        return f"{POLICY}-{self.stage}-{self.run}-{folder.name}" if self.is_adapter else POLICY

    @contextmanager
    def opened(self, folder: Path) -> Iterator[Self]:
        """Wait until the sampling server answers, check it, load the weights in `folder` into it, and yield it."""
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
        self.load(self, folder)
        yield self

    def prepare(self, folder: Path) -> None:
        if not self.is_adapter:
            self.engine.prepare_reloads(folder, self.client)

    def load(self, server: SamplingServer, folder: Path, before: Path | None = None) -> None:
        timeout_s = self.client.timeout_s
        if not self.rank:
            self.engine.reload_weights(self.address, self.api_key, folder.resolve(), timeout_s)
            return
        self.engine.check_takes_adapters(self.client, self.rank, folder)
        former, name = self._adapters(), self.name_of(folder)
        if name in former:  # it is given again to a server that had not ended
            self.engine.unload_adapter(self.address, self.api_key, name, timeout_s)
        self.engine.load_adapter(self.address, self.api_key, name, folder.resolve(), timeout_s)
        self._unload(former - {name})

    def forget(self) -> None:
        """Unload the stage's adapters from the server, if it answers."""
        with suppress(ServerError, TransientError):
            self._unload(self._adapters())

    def _adapters(self) -> set[str]:
        """Return the names of this stage's adapters that the server has."""
        prefix = f"{POLICY}-{self.stage}-"
        return {name for name in self.client.model_names() if self.is_adapter and name.startswith(prefix)}

    def _unload(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self.engine.unload_adapter(self.address, self.api_key, name, self.client.timeout_s)


def external_server_problems(
    config: TrainConfig, model: ModelFacts, context: StageContext | None = None
) -> Iterator[LifecycleError]:
    """Yield the first problem of servers that the recipe names. context: of a run, whose folders they must read."""
    if not (config.sampling and config.sampling.server and is_main_process()):
        return
    try:
        for server in ExternalServer.all_of(config, model, context.version if context else ""):
            server.check(context.scratch / SYNCED_WEIGHTS / "none" if context else None)
    except TransientError as error:
        yield TransientError(f"{error}; start the server that samples, or correct `{config.sampling_block}.server.url`")
    except LifecycleError as error:
        yield error
