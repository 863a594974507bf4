"""A server that samples from the model that is trained: it is given the engine's weights, and it is checked that it has
them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from stages.core.contract import StageContext, is_main_process
from stages.data.batch import Batch
from stages.engines.engine import Engine
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.kinds.train.rollouts.named_server import WEIGHTS, NamedServer
from stages.kinds.train.rollouts.own_server import OwnServer
from stages.kinds.train.rollouts.probe import Probe
from stages.kinds.train.rollouts.server import Host, RolloutServer
from stages.kinds.train.watchdog import Watchdog


class SyncedServer:
    """To be closed. server: what rank 0 asks. bound_dtype: in which server and engine both compute."""

    def __init__(
        self,
        config: TrainConfig,
        context: StageContext,
        options: SamplingOptions,
        engine: Engine,
        watchdog: Watchdog,
        packing: Packing,
        model_folder: Path,
    ) -> None:
        """model_folder: of the model that is trained, or that an adapter learns beside."""
        self._engine = engine
        self._watchdog = watchdog
        self._packing = packing
        self._dtype = "float32" if config.precision == "fp32" else "bfloat16"
        dtype = options.dtype(config.precision)
        self.bound_dtype = self._dtype if dtype == self._dtype else "bfloat16"
        host: Host
        if options.server:
            host = NamedServer.of(config, model_folder)
        else:
            serving = options.serving.model_copy(update={"max_model_len": packing.most_tokens, "dtype": dtype})
            host = OwnServer(context, serving, config.execution, model_folder if config.adapter else None)
        self.server = RolloutServer(host, config.execution, context.warn, is_adapter=config.adapter is not None)
        # Not in memory (tmpfs): what a kill leaves there nobody would remove, and fresh files are read from the page
        # cache anyway.
        self._weights = context.scratch / WEIGHTS
        self._probe_path = context.scratch / "rollouts" / "probe.json"
        self._probe: Probe | None = None
        if is_main_process():
            shutil.rmtree(self._weights, ignore_errors=True)  # of another attempt

    def give_weights(self, step: int) -> float:
        """Those of the engine before this step, and a look whether the server has them; returns the seconds it took.

        Collective. Raises TrainingError when it answers by others, and as `RolloutServer.take` does.
        """
        began_s = time.perf_counter()
        self._watchdog.begins(f"giving the server the weights for step {step}")
        folder = self._weights / f"step-{step}"
        for problem in self._engine.export(folder, getattr(torch, self._dtype)):
            raise problem
        if is_main_process():
            self.server.take(folder)
        self.check(step)
        return time.perf_counter() - began_s

    def check(self, step: int) -> None:
        """By the probe, if it has been taken; collective."""
        if self._probe:
            of_engine = self._engine.target_log_probabilities(self._probe.batch)
            if is_main_process():
                self._probe.check(of_engine, self.server, self.bound_dtype, step)

    @property
    def has_probe(self) -> bool:
        """Whether `check` compares anything."""
        return self._probe is not None

    def take_probe(self, documents: Sequence[AnsweredPrompt]) -> None:
        """Keep some of these, the first there are, to compare by; the same on every process. Collective."""
        if self._probe:
            return
        if self._engine.broadcast_from_rank0(float(self._probe_path.is_file())):
            self._probe = Probe.read(self._probe_path, self._packing)
            return
        self._probe = Probe.take(documents, self._packing, self._engine)
        if is_main_process():
            self._probe_path.parent.mkdir(parents=True, exist_ok=True)
            self._probe.write(self._probe_path)

    def recorded(self) -> tuple[Batch, torch.Tensor | None]:
        """See `stages.kinds.train.batches.Batches`."""
        assert self._probe, "completions were learned from"
        return self._probe.batch, self._probe.untrained

    def close(self) -> None:
        """End the server."""
        self.server.close()
