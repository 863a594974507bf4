"""A few completions that stay the same: what the server gives to them is compared with what the engine gives.

They are the first that the untrained model gave, and are recorded beside the trained one, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from stages.core.errors import TrainingError
from stages.core.files import write_atomically
from stages.data.batch import Batch
from stages.engines.engine import Engine
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.kinds.train.rollouts.server import RolloutServer

NUM_DOCUMENTS = 16
BOUNDS_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |Δ log-probability| of a token, by what is computed in: two engines' kernels differ by some 1e-5 in fp32, and by
some 0.01 in bf16; weights that are a few steps older by 0.05 and more."""


@dataclass(frozen=True)
class Probe:
    """untrained: float32 [targets], log-probabilities of the completions' tokens before training; None where an earlier
    version took the probe."""

    documents: list[AnsweredPrompt]
    untrained: torch.Tensor | None
    batch: Batch

    @classmethod
    def take(cls, documents: Sequence[AnsweredPrompt], packing: Packing, engine: Engine) -> Probe:
        """Of the untrained engine. Collective; every process gives the same documents."""
        chosen = [documents[0].cut(packing.most_tokens - 1)]  # the server, asked about them, adds a token
        for one in documents[1:NUM_DOCUMENTS]:
            if sum(map(len, chosen)) + len(one) <= packing.sequence_length and len(one) < packing.most_tokens:
                chosen.append(one)
        batch = _untempered(packing).batch([chosen])
        return cls(chosen, engine.target_log_probabilities(batch)[batch.has_target], batch)

    def write(self, path: Path) -> None:
        untrained = None if self.untrained is None else self.untrained.tolist()
        content = {"documents": [asdict(one) for one in self.documents], "untrained_tokens": untrained}
        write_atomically(path, json.dumps(content))

    @classmethod
    def read(cls, path: Path, packing: Packing) -> Probe:
        content = json.loads(path.read_text(encoding="utf-8"))
        documents = [AnsweredPrompt(**one) for one in content["documents"]]
        untrained = content.get("untrained_tokens")
        batch = _untempered(packing).batch([documents])
        return cls(documents, None if untrained is None else torch.tensor(untrained), batch)

    def check(self, of_engine: torch.Tensor, server: RolloutServer, dtype: str, step: int) -> float:
        """Mean |Δ log-probability| of the completions' tokens, in nats. of_engine: float32 [rows, sequence], its own.

        Raises TrainingError when the server answers by other weights than the engine has.
        """
        rows = server.predictions([one.prompt + one.completion for one in self.documents])
        served = [
            value
            for row, one in zip(rows, self.documents, strict=True)
            for value in row.log_probabilities[len(one.prompt) - 1 :]
        ]
        difference = (of_engine[self.batch.has_target] - torch.tensor(served)).abs().mean().item()
        check_difference(difference, dtype, f"given the weights of step {step - 1}, the server")
        return difference


def _untempered(packing: Packing) -> Packing:
    """What a server gives to tokens that it is shown is of no temperature, whatever it samples at."""
    return replace(packing, temperature=1.0)


def check_difference(difference: float, dtype: str, what: str) -> None:
    """difference: mean |Δ log-probability|, in nats. Raises TrainingError when it is beyond what `dtype` explains."""
    if not difference <= BOUNDS_NATS[dtype]:
        raise TrainingError(
            f"{what} gives log-probabilities that are {difference:.3g} nats a token from those of the training engine; "
            f"at most {BOUNDS_NATS[dtype]:g} is rounding in {dtype}. It answers by other weights: see its log "
            "(server.log, unless others started it) for weights that it did not load, and report this with the model's "
            "name"
        )
