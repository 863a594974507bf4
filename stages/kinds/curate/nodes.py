"""Curation on several nodes: each judges every N-th batch of rows, and the first compares the rows that all have kept.

All nodes read all rows, so that only outcomes travel. They do so as JSON in tensors of bytes: nothing that comes from a
socket is unpickled.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.data.files import RowLocation
from stages.kinds.curate.config import CurateConfig
from stages.kinds.curate.judging import DroppedRow, Judgement, KeptRow, Outcome, RowBatch, batches_of, judgements
from stages.kinds.curate.spool import SourcePlace
from stages.parallel.processes import joined_processes


@contextmanager
def joined_nodes() -> Iterator["Nodes"]:
    """Join the stage's processes, one on each node, until the `with` block ends."""
    with joined_processes():
        yield Nodes(dist.get_rank(), dist.get_world_size())


class Nodes:
    """Processes that curate together, one on each node. rank: of this one."""

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._count = rank, count

    def judged(self, config: CurateConfig, context: StageContext, num_known: int) -> Generator[Judgement]:
        """Yield what `judging.judged` does, on the first node, while the others do their shares (`help`)."""
        self._agree_on(num_known)
        seen: deque[tuple[int, RowBatch]] = deque()
        """Batches that were read, but not yet yielded, each with the rank of the node that judges it."""

        def own() -> Iterator[RowBatch]:
            for number, batch in enumerate(batches_of(config, context, num_known)):
                rank = number % self._count
                seen.append((rank, replace(batch, rows=[])))
                if not rank:
                    yield batch

        with closing(judgements(config, context, own())) as found:
            for _, outcomes in found:
                yield from self._received(seen)
                yield seen.popleft()[1], outcomes
        yield from self._received(seen)

    def help(self, config: CurateConfig, context: StageContext) -> None:
        """Judge this node's share of the rows, and send the outcomes to the first node."""
        batches = batches_of(config, context, self._agree_on(0))
        with closing(judgements(config, context, islice(batches, self._rank, None, self._count))) as found:
            for _, outcomes in found:
                content = torch.frombuffer(bytearray(encoded(outcomes)), dtype=torch.uint8)
                dist.send(torch.tensor([len(content)]), 0)
                dist.send(content, 0)

    def _agree_on(self, num_known: int) -> int:
        """Return the number of rows that an earlier attempt has judged, which the first node knows. Collective."""
        shared = torch.tensor([num_known])
        dist.broadcast(shared, 0)
        return int(shared)

    def _received(self, seen: deque[tuple[int, RowBatch]]) -> Iterator[Judgement]:
        """Yield the batches of other nodes that come next, with their outcomes."""
        while seen and seen[0][0]:
            rank, batch = seen.popleft()
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, rank)
            yield batch, decoded(content.numpy().tobytes())


def encoded(outcomes: Iterable[Outcome]) -> bytes:
    """Return the outcomes of a batch as JSON, whose texts may hold halves of surrogate pairs."""
    return json.dumps([_fields(outcome) for outcome in outcomes], default=str).encode()


def decoded(content: bytes) -> list[Outcome]:
    """Return the outcomes of a batch from JSON (`encoded`)."""
    return [READERS[kind](*fields) for kind, *fields in json.loads(content)]


def _fields(outcome: Outcome) -> list[Any]:
    if isinstance(outcome, DataError):
        return ["error", str(outcome)]
    if isinstance(outcome, DroppedRow):
        at = outcome.place.place
        place = [outcome.place.dataset, at.file, at.number, at.counts]
        return ["dropped", place, outcome.step, outcome.reason, outcome.content, outcome.masked]
    numbers = outcome.runs.tobytes().hex(), outcome.signature.tobytes().hex()
    return ["kept", outcome.line.decode(), outcome.digest.hex(), outcome.masked, *numbers]


def _kept(line: str, digest: str, masked: dict[str, int], runs: str, signature: str) -> KeptRow:
    numbers = np.frombuffer(bytes.fromhex(runs), np.uint64), np.frombuffer(bytes.fromhex(signature), np.uint32)
    return KeptRow(line.encode(), bytes.fromhex(digest), Counter(masked), *numbers)


def _dropped(place: list[Any], step: str, reason: str, content: object, masked: dict[str, int]) -> DroppedRow:
    dataset, *at = place
    return DroppedRow(SourcePlace(dataset, RowLocation(*at)), step, reason, content, Counter(masked))


READERS: dict[str, Callable[..., Outcome]] = {"error": DataError, "kept": _kept, "dropped": _dropped}
