"""Sampling server as all processes of a training use it: it gets the engine's weights, and is checked by a probe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.core.contract import SYNCED_WEIGHTS, StageContext, is_main_process
from stages.engines.engine import Engine, free_memory
from stages.engines.recorded import RecordedBatch
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.kinds.train.rollouts.many_servers import ManyServers
from stages.kinds.train.rollouts.own_server import OwnServer, shared_gpu
from stages.kinds.train.rollouts.probe import Probe
from stages.kinds.train.rollouts.server import ExternalServer, PolicyServer, RolloutServer
from stages.kinds.train.watchdog import Watchdog
from stages.models.facts import ModelFacts
from stages.serving.held_weights import HeldWeights


@dataclass(frozen=True)
class GatheredWeights:
    """Weights of the engine at one step, on their way to the server, in a folder or, on rank 0, in memory.

    of_engine: the engine's log-probabilities of the probe with them, float32 [rows, sequence]; None before it is
    chosen.
    """

    name: str
    content: HeldWeights | Path
    of_engine: torch.Tensor | None

    def close(self) -> None:
        """Free weights in memory that no server got."""
        if isinstance(self.content, HeldWeights):
            self.content.close()


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
        self._was_gathered = False
        self._is_colocated = options.is_colocated
        self._server: PolicyServer
        self._named = ExternalServer.all_of(config, model, context.version) if options.server else []
        if len(self._named) > 1:
            self._takes_folders = True
            self._server = ManyServers(self._named, config.execution, context.warn)
        elif self._named:
            self._takes_folders = True
            self._server = RolloutServer(self._named[0], config.execution, context.warn)
        else:
            serving = options.serving.model_copy(update={"max_model_len": self.packing.most_tokens, "dtype": dtype})
            base = model.folder if config.adapter else None
            host = OwnServer(
                context, options, serving, config.execution, base, shared_gpu(config, model, engine.device)
            )
            self._takes_folders = not host.transfer
            self._server = RolloutServer(host, config.execution, context.warn, sleeps=options.is_colocated)
        # Not in memory (tmpfs): after a kill no one would remove the files there, and fresh files on disk are read
        # from the page cache anyway.
        self._weights = context.scratch / SYNCED_WEIGHTS
        self._probe_path = context.scratch / "rollouts" / "probe.json"
        self._probe: Probe | None = None
        if is_main_process():
            shutil.rmtree(self._weights, ignore_errors=True)  # of another attempt

    def sample(self, name: str, write: Callable[[PolicyServer], None]) -> float:
        """Give the server the engine's weights, let rank 0 write completions to a file, and wait for it. Collective.

        name: of the weights, in messages and as a folder, another one at each call: "step 5". A server on the
        training's devices sleeps afterwards, and must not be asked until the next sampling.
        Returns the seconds of the weights' transfer. Raises as `RolloutServer` and `write` do, and as `check`.
        """
        began_s = time.perf_counter()
        if is_main_process():
            self._server.forget()  # of two copies of the weights in memory, none is needed
        weights = self.gathered(name)
        if self._is_colocated:
            free_memory()
            self._engine.broadcast_from_rank0(0.0)  # the server wakes up when all processes have freed theirs
        if is_main_process():
            self.give(weights)
        sync_s = time.perf_counter() - began_s
        self._watchdog.begins(f"the completions for {name}")
        if is_main_process():
            write(self._server)
            self._server.rest()
        self._engine.broadcast_from_rank0(0.0)  # the others wait here until rank 0 has written the file
        return sync_s

    def gathered(self, name: str) -> GatheredWeights:
        """Return the engine's weights of now, which a later call of `give` passes on. Collective.

        A server starts from a folder. Raises as `Engine.export` does.
        """
        self._watchdog.begins(f"giving the server the weights for {name}")
        by_folder = self._takes_folders or not self._was_gathered
        folder, dtype, held = self._weights / name.replace(" ", "-"), getattr(torch, self._dtype), None
        if by_folder:
            for problem in self._engine.export(folder, dtype):
                # such as numbers too large for the dtype: the server would answer with other weights than the engine's
                raise problem
        elif is_main_process():
            held = HeldWeights.gather(self._engine.whole_weights(dtype))
        else:
            for _ in self._engine.whole_weights(dtype):  # each is gathered from all processes
                pass
        self._was_gathered = True
        return GatheredWeights(name, held or folder, self._probed())

    def give(self, weights: GatheredWeights) -> PolicyServer:
        """Give the server weights on rank 0, check its answers, and return it. From one thread at a time.

        Raises as `check` and `RolloutServer.take` do.
        """
        if isinstance(weights.content, HeldWeights):
            self._server.take_held(weights.content)
        else:
            self._server.take(weights.content)
        self._compare(weights.of_engine, weights.name)
        return self._server

    def holding(self) -> PolicyServer:
        """Return the server, which still has the weights of the last `give`, on rank 0."""
        return self._server

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

    def give_up(self) -> None:
        """Let a sampling in another thread of rank 0 end early, before `close`."""
        self._server.give_up()

    def close(self) -> None:
        self._server.close()
        if is_main_process():
            for one in self._named:
                one.forget()
