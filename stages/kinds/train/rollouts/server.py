"""Sampling server of a training run: its start or connection, weight updates, checks and restarts.

When it dies or hangs, what is under way is asked again of its successor, which gets the same weights. `Probe` checks by
a few fixed completions that it answers with the engine's weights.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, Self

import torch

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import LifecycleError, ServerError, TrainingError, TransientError
from stages.core.files import write_atomically
from stages.core.redaction import redact
from stages.data.batch import Batch
from stages.engines.engine import Engine, free_memory
from stages.engines.recorded import RecordedBatch
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.named_server import CHECK_TIMEOUT_S, ENGINE, client_of
from stages.kinds.train.rollouts.documents import DOCUMENTS, AnsweredPrompt, Packing, most_tokens
from stages.kinds.train.rollouts.own_server import OwnServer, shared_gpu
from stages.kinds.train.watchdog import Watchdog
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
    """Provider of the sampling server (protocol). remedy: what is done about a failed server, in messages."""

    @property
    def remedy(self) -> str: ...
    @property
    def transfer(self) -> str | None:
        """Way in which its server gets weights that are held in memory; None: it gets folders."""

    def opened(self, folder: Path, name: str) -> AbstractContextManager[SamplingServer]:
        """Open a sampling server with the weights in `folder`. name: of an adapter, or of a started server's model.

        Raises ServerError when no server comes up, TransientError when none answers in time.
        """

    def prepare(self, folder: Path) -> None:
        """Prepare a folder of weights, in place, for a running sampling server; raise as `opened` does."""


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
        is_adapter: bool,
        sleeps: bool = False,
    ) -> None:
        self._host = host
        self._execution, self._concurrent = execution, execution.concurrent_requests
        self._warn = warn
        self._is_adapter = is_adapter
        self._sleeps = sleeps
        self._stack = ExitStack()
        self._server: SamplingServer | None = None
        self._folder: Path | None = None
        self._held: HeldWeights | None = None
        """Weights newer than those in the folder, from which a server starts."""
        self._restarts = 0

    def take(self, folder: Path) -> None:
        """Load the weights in `folder` and remove the former folder; no request may be under way.

        Raises ServerError when no server comes up, TransientError when it fails repeatedly.
        """
        before, self._folder = self._folder, folder
        self._replace(lambda server: self._load(server, folder, before))
        if before:
            # Only now: vLLM may read the files of an adapter again as long as it is loaded.
            shutil.rmtree(before, ignore_errors=True)

    def hold(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy new weights to memory that a server can read, and forget the former, before `take_held`."""
        self._forget()
        self._held = HeldWeights.gather(weights)

    def take_held(self) -> None:
        """Give the server the weights that are held, as `take` does those in a folder; raises as it does."""
        held = self._held
        assert held, "weights are held before they are given"
        self._replace(lambda server: _connection(server).give(held))

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        """Send requests to the sampling server, and call `keep` with the number, the request and the response of each.

        Raises ServerError for a request that is refused, TransientError when the server fails repeatedly.
        """
        remaining = dict(requests)

        def kept(number: int, request: Request, answer: Answer) -> None:
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
            server.engine.sleep(server.address, server.api_key, timeout_s, keeps_weights=self._is_adapter)
        except (ServerError, TransientError) as error:
            self._end(error)
        else:
            self._restarts = 0

    def predictions(self, documents: Sequence[AnsweredPrompt]) -> list[Predicted]:
        """Return the server's log-probabilities of all tokens of documents; TransientError if it fails repeatedly."""
        of_text = [one.prompt + one.completion for one in documents if not one.pictures]
        seen = [one.pictures.seen(one.prompt, one.completion) for one in documents if one.pictures]
        while True:
            try:
                client, server = self._client, self._running
                rows = iter(client.predictions(of_text) if of_text else ())
                pictured = iter(server.engine.seeing_predictions(server.address, client, seen) if seen else ())
                return [next(pictured if one.pictures else rows) for one in documents]
            except (ServerError, TransientError) as error:
                self._restart(error)

    def close(self) -> None:
        self._stop()
        self._forget()

    def _stop(self) -> None:
        self._stack.close()
        self._server = None

    def _forget(self) -> None:
        if self._held:
            self._held.close()
            self._held = None

    @property
    def _running(self) -> SamplingServer:
        assert self._server, "weights are taken before anything is asked"
        return self._server

    @property
    def _client(self) -> Client:
        client = self._running.client
        model = self._name if self._is_adapter else client.model
        return replace(client, model=model, timeout_s=self._execution.rollout_timeout_s)

    @property
    def _name(self) -> str:
        """Name of the trained model in requests; each adapter version has its own, since servers cache by name."""
        assert self._folder
        return f"{POLICY}-{self._folder.name}" if self._is_adapter else POLICY

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
        if self._is_adapter:
            self._swap_adapter(server, before)
        else:
            self._host.prepare(folder)
            timeout_s = self._execution.rollout_timeout_s
            server.engine.reload_weights(server.address, server.api_key, folder, timeout_s)

    def _swap_adapter(self, server: SamplingServer, before: Path | None) -> None:
        assert self._folder
        timeout_s = self._execution.rollout_timeout_s
        server.engine.load_adapter(server.address, server.api_key, self._name, self._folder.resolve(), timeout_s)
        if before:
            # A new name and folder for every version: vLLM's prefix cache goes by name and path, so
            # an adapter reloaded in place gave answers of the old one (off by 0.5 nats).
            server.engine.unload_adapter(server.address, server.api_key, f"{POLICY}-{before.name}", timeout_s)

    def _wake_up(self, server: SamplingServer, part: SleepingPart) -> None:
        if self._sleeps:
            server.engine.wake_up(server.address, server.api_key, part, self._execution.rollout_timeout_s)

    def _restart(self, error: LifecycleError) -> None:
        self._end(error)
        self._start()

    def _end(self, error: LifecycleError) -> None:
        """End a server that failed; raise TransientError if it has failed too often in a row."""
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            reason = f"the server that samples failed {self._restarts} times in a row: {error}"
            raise TransientError(reason, died=not self._running.alive()) from error
        self._warn(f"the server that samples {self._host.remedy}: {error}")
        self._stop()

    def _start(self) -> None:
        assert self._folder
        with ExitStack() as stack:
            server = stack.enter_context(self._host.opened(self._folder, self._name))
            if self._held:
                _connection(server).give(self._held)
            # The server is up: `close` ends it from here on. If opening failed, `stack` has ended it already.
            self._stack = stack.pop_all()
        self._server = server


def _connection(server: SamplingServer) -> WeightConnection:
    assert server.connection, "weights are held for servers that get them so"
    return server.connection


NUM_DOCUMENTS = 16
"""Largest number of completions by which sampling server and training engine are compared."""
BOUNDS_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean |Δ log-probability| of a token between server and engine that counts as rounding, in nats, by dtype.

Kernels differ by some 1e-5 in fp32 and 0.01 in bf16; weights that are a few steps older by 0.05 and more."""


@dataclass(frozen=True)
class Probe:
    """First sampled completions, whose log-probabilities show whether the server answers with the engine's weights.

    They are recorded beside the trained model, too. untrained: float32 [targets], log-probabilities of the completions'
    tokens before training; None where an earlier version took the probe.
    """

    documents: list[AnsweredPrompt]
    untrained: torch.Tensor | None
    batch: Batch

    @classmethod
    def take(cls, documents: Sequence[AnsweredPrompt], packing: Packing, engine: Engine) -> Probe:
        """Choose completions to compare by, with log-probabilities before training; all pass the same. Collective."""
        # at least one document, whatever its length; the others only as they fit into the same row
        # and one with pictures, if there is any: with a tower of former weights, the server would answer otherwise
        first = next((one for one in documents if one.pictures and one.completion), documents[0])
        chosen = [first.cut(packing.most_tokens - 1)]  # the server, asked about them, adds a token
        for one in documents[:NUM_DOCUMENTS]:
            fits = sum(map(len, chosen)) + len(one) <= packing.sequence_length and len(one) < packing.most_tokens
            if one is not first and fits:
                chosen.append(one)
        batch = _untempered(packing).batch([chosen]).seen()
        return cls(chosen, engine.target_log_probabilities(batch)[batch.signal.has_target], batch)

    def write(self, path: Path) -> None:
        untrained = None if self.untrained is None else self.untrained.tolist()
        content = {"documents": DOCUMENTS.dump_python(self.documents, mode="json"), "untrained_tokens": untrained}
        write_atomically(path, json.dumps(content))

    @classmethod
    def read(cls, path: Path, packing: Packing) -> Probe:
        content = json.loads(path.read_text(encoding="utf-8"))
        documents = DOCUMENTS.validate_python(content["documents"])
        untrained = content.get("untrained_tokens")
        batch = _untempered(packing).batch([documents]).seen()
        return cls(documents, None if untrained is None else torch.tensor(untrained), batch)

    def compare(self, of_engine: torch.Tensor, server: RolloutServer, dtype: str, name: str) -> float:
        """Return the mean |Δ log-probability| between server and engine, in nats. of_engine: float32 [rows, sequence].

        Raises TrainingError when the server answers with other weights than the engine's.
        """
        rows = server.predictions(self.documents)
        served = [
            value
            for row, one in zip(rows, self.documents, strict=True)
            # Entry t is of token t + 1, so the completion's first is at len(prompt) - 1.
            for value in row.log_probabilities[len(one.prompt) - 1 :]
        ]
        difference = (of_engine[self.batch.signal.has_target] - torch.tensor(served)).abs().mean().item()
        check_difference(difference, dtype, f"given the weights for {name}, the server")
        return difference


def _untempered(packing: Packing) -> Packing:
    """Return the packing options with temperature 1, at which servers return log-probabilities of given tokens."""
    return replace(packing, temperature=1.0)


def check_difference(difference: float, dtype: str, what: str) -> None:
    """Raise TrainingError if the mean |Δ log-probability| (nats a token) is more than rounding in `dtype`."""
    # not `>`: NaN, from weights that are not finite, must fail, too
    if not difference <= BOUNDS_NATS[dtype]:
        raise TrainingError(
            f"{what} gives log-probabilities that are {difference:.3g} nats a token from those of the training engine; "
            f"at most {BOUNDS_NATS[dtype]:g} is rounding in {dtype}. The server answers with other weights: search its "
            "log (server.log, unless others started it) for weights that it did not load, and report this with the "
            "model's name"
        )


POLL_INTERVAL_S = 1.0
WEIGHTS = "weights"
"""Folder in the stage's scratch folder through which the weights reach the sampling server."""


@dataclass(frozen=True)
class ExternalServer:
    """Sampling server that others started, checked before use and never ended; a `ServerProvider` and `SamplingServer`.

    It reads weights from a folder, under the same path. num_tokens: most of a prompt and its completion.
    """

    remedy: ClassVar[str] = "is waited for, and given the same weights again"
    engine: ClassVar[ServingEngine] = ENGINE
    transfer: ClassVar[None] = None
    connection: ClassVar[None] = None

    client: Client
    num_tokens: int
    dtype: str
    ready_timeout_s: float

    @classmethod
    def of(cls, config: TrainConfig, model: ModelFacts) -> Self:
        """Return the sampling server that the recipe names. Raises RecipeError for an unset environment variable."""
        sampling = config.sampling
        assert sampling
        num_tokens = most_tokens(config, sampling, model)
        return cls(client_of(config), num_tokens, sampling.dtype(config.precision), config.execution.ready_timeout_s)

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
            if folder:
                self.engine.check_reads(self.address, self.api_key, folder.resolve(), CHECK_TIMEOUT_S)
        except ServerError as error:  # what a server answers may repeat what it was sent
            raise ServerError(redact(str(error), [self.api_key] if self.api_key else [])) from None

    @contextmanager
    def opened(self, folder: Path, name: str) -> Iterator[Self]:
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
        self.engine.reload_weights(self.address, self.api_key, folder.resolve(), self.client.timeout_s)
        yield self

    def prepare(self, folder: Path) -> None:
        self.engine.prepare_reloads(folder, self.client)


def external_server_problems(
    config: TrainConfig, model: ModelFacts, context: StageContext | None = None
) -> Iterator[LifecycleError]:
    """Yield problems of the server that the recipe names, if any. context: of a run, whose folders it must read."""
    if not (config.sampling and config.sampling.server and is_main_process()):
        return
    try:
        ExternalServer.of(config, model).check(context.scratch / WEIGHTS / "none" if context else None)
    except TransientError as error:
        yield TransientError(f"{error}; start the server that samples, or correct `{config.sampling_block}.server.url`")
    except LifecycleError as error:
        yield error


class SyncedServer:
    """Sampling server as all training processes use it: it answers with the engine's current weights; must be closed.

    bound_dtype: the less precise dtype of server and engine.
    """

    def __init__(
        self,
        config: TrainConfig,
        context: StageContext,
        options: SamplingOptions,
        model: ModelFacts,
        *,
        engine: Engine,
        watchdog: Watchdog,
        packing: Packing,
    ) -> None:
        self._engine = engine
        self._watchdog = watchdog
        self.packing = packing
        self._dtype = "float32" if config.precision == "fp32" else "bfloat16"
        dtype = options.dtype(config.precision)
        # bf16 on either side rounds to some 0.01 nats, however exact the other side is.
        self.bound_dtype = self._dtype if dtype == self._dtype else "bfloat16"
        host: ServerProvider
        if options.server:
            host = ExternalServer.of(config, model)
        else:
            serving = options.serving.model_copy(update={"max_model_len": self.packing.most_tokens, "dtype": dtype})
            base = model.folder if config.adapter else None
            host = OwnServer(
                context, options, serving, config.execution, base, shared_gpu(config, model, engine.device)
            )
        self._takes_folders = not host.transfer
        self._was_given = False
        self._is_colocated = options.is_colocated
        self._server = RolloutServer(
            host,
            config.execution,
            context.warn,
            is_adapter=config.adapter is not None,
            sleeps=options.is_colocated,
        )
        # Not in memory (tmpfs): after a kill no one would remove the files there, and fresh files on disk are read
        # from the page cache anyway.
        self._weights = context.scratch / WEIGHTS
        self._probe_path = context.scratch / "rollouts" / "probe.json"
        self._probe: Probe | None = None
        if is_main_process():
            shutil.rmtree(self._weights, ignore_errors=True)  # of another attempt

    def sample(self, name: str, write: Callable[[RolloutServer], None]) -> float:
        """Give the server the engine's weights, let rank 0 write completions to a file, and wait for it. Collective.

        name: of the weights, in messages and as a folder, another one at each call: "step 5". A server on the
        training's devices sleeps afterwards, and must not be asked until the next sampling.
        Returns the seconds of the weights' transfer. Raises as `RolloutServer` and `write` do, and as `check`.
        """
        sync_s = self._give_weights(name)
        self._watchdog.begins(f"the completions for {name}")
        if is_main_process():
            write(self._server)
            self._server.rest()
        self._engine.broadcast_from_rank0(0.0)  # the others wait here until rank 0 has written the file
        return sync_s

    def _give_weights(self, name: str) -> float:
        """Give the engine's weights to the server and check its answers. Collective; returns the seconds.

        A server starts from a folder. Raises as `check` and `RolloutServer.take` do.
        """
        began_s = time.perf_counter()
        self._watchdog.begins(f"giving the server the weights for {name}")
        by_folder = self._takes_folders or not self._was_given
        folder, dtype = self._weights / name.replace(" ", "-"), getattr(torch, self._dtype)
        if by_folder:
            for problem in self._engine.export(folder, dtype):
                # such as numbers too large for the dtype: the server would answer with other weights than the engine's
                raise problem
        elif is_main_process():
            self._server.hold(self._engine.whole_weights(dtype))
        else:
            for _ in self._engine.whole_weights(dtype):  # each is gathered from all processes
                pass
        of_engine = self._probed()
        if self._is_colocated:
            free_memory()
            self._engine.broadcast_from_rank0(0.0)  # the server wakes up when all processes have freed theirs
        if is_main_process():
            if by_folder:
                self._server.take(folder)
            else:
                self._server.take_held()
        self._was_given = True
        self._compare(of_engine, name)
        return time.perf_counter() - began_s

    def check(self, name: str) -> None:
        """Compare server and engine by the fixed completions (`Probe`), if already chosen.

        Collective. Raises TrainingError when it answers with other weights than the engine's.
        """
        self._compare(self._probed(), name)

    def _probed(self) -> torch.Tensor | None:
        """Return the engine's log-probabilities of the probe, float32 [rows, sequence]; None before it is chosen."""
        return self._engine.target_log_probabilities(self._probe.batch) if self._probe else None

    def _compare(self, of_engine: torch.Tensor | None, name: str) -> None:
        if self._probe and of_engine is not None and is_main_process():
            self._probe.compare(of_engine, self._server, self.bound_dtype, name)

    @property
    def has_probe(self) -> bool:
        return self._probe is not None

    def take_probe(self, documents: Sequence[AnsweredPrompt]) -> None:
        """Choose, once, or load the completions by which server and engine are compared (`Probe`). Collective."""
        if self._probe:
            return
        # An earlier attempt's: its `untrained` are of the model before training, which this engine no longer has.
        # Rank 0 decides for all, since taking a probe is collective.
        if self._engine.broadcast_from_rank0(float(self._probe_path.is_file())):
            self._probe = Probe.read(self._probe_path, self.packing)
            return
        self._probe = Probe.take(documents, self.packing, self._engine)
        if is_main_process():
            self._probe_path.parent.mkdir(parents=True, exist_ok=True)
            self._probe.write(self._probe_path)

    def recorded(self) -> RecordedBatch:
        assert self._probe, "completions were learned from"
        pictures = [one.pictures.images() if one.pictures else [] for one in self._probe.documents]
        return RecordedBatch(self._probe.batch, self._probe.untrained, pictures if any(pictures) else ())

    def close(self) -> None:
        self._server.close()
