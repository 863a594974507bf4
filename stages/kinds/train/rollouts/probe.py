"""Comparison of a sampling server with the engine that trains, by a few completions that stay the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stages.core.errors import TrainingError
from stages.core.files import write_atomically
from stages.data.batch import Batch
from stages.engines.engine import Engine
from stages.kinds.train.rollouts.documents import DOCUMENTS, AnsweredPrompt, Packing
from stages.kinds.train.rollouts.server import PolicyServer

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

    def compare(self, of_engine: torch.Tensor, server: PolicyServer, dtype: str, name: str) -> float:
        """Return the mean |Δ log-probability| of engine and worst server, in nats. of_engine: float32 [rows, sequence].

        Raises TrainingError when the server answers with other weights than the engine's.
        """
        expected, differences = of_engine[self.batch.signal.has_target], []
        for which, rows in server.predictions(self.documents):
            served = [
                value
                for row, one in zip(rows, self.documents, strict=True)
                # Entry t is of token t + 1, so the completion's first is at len(prompt) - 1.
                for value, is_learned in zip(row.log_probabilities[len(one.prompt) - 1 :], one.learned, strict=False)
                if is_learned
            ]
            differences.append((expected - torch.tensor(served)).abs().mean().item())
            check_difference(differences[-1], dtype, f"given the weights for {name}, {which}")
        return max(differences)


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
