"""Parts of a dataset → pieces in a store, by as many processes as there are cores for it.

Each is a new interpreter (multiprocessing's `spawn`): a fork of this process would have its locks without its threads,
and multiprocessing's `forkserver` stays for as long as training, and leaves a folder when this process is killed. They
end when the process that asked for them does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from stages.core.errors import ResourceError
from stages.data.files import BadRow, Row, read_part
from stages.data.parts import DataPart
from stages.data.pieces import PieceStore
from stages.data.tokenizing import PartTokenizer

MAX_PROCESSES = 64
BYTES_PER_PROCESS = 4 << 20
"""Fewer are tokenized before another process has started."""
PARTS_AHEAD = 4
"""Of each process, so that none waits for work."""

KeyedPart = tuple[DataPart, str]
"""A part, and the key of its pieces."""


@dataclass(frozen=True)
class _Worker:
    tokenizer: PartTokenizer
    store: PieceStore


_worker: _Worker


def num_processes(num_bytes: int) -> int:
    """For so much to tokenize: one for each core that the processes of this stage have here, where that is worth it."""
    threads, ranks = os.environ.get("OMP_NUM_THREADS"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    if threads and threads.isdecimal():
        cores = min(cores, int(threads) * ranks)
    return max(1, min(cores, MAX_PROCESSES, num_bytes // BYTES_PER_PROCESS))


def tokenize(
    tokenizer: PartTokenizer, store: Path, parts: Sequence[KeyedPart], processes: int
) -> Generator[tuple[KeyedPart, int]]:
    """Write the pieces of all parts; each part, in order, and the number of its rows, once they are there.

    Raises what tokenizing the first bad part raises, and ResourceError when a process is killed. When the iterator is
    closed, no process is left.
    """
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (tokenizer, store))
    waiting: deque[tuple[KeyedPart, Future[int]]] = deque()
    todo = iter(parts)
    try:
        while True:
            for keyed in todo:
                waiting.append((keyed, pool.submit(_tokenize, *keyed)))
                if len(waiting) >= PARTS_AHEAD * processes:
                    break
            if not waiting:
                break
            keyed, done = waiting.popleft()
            yield keyed, done.result()
    except BrokenProcessPool as error:
        raise ResourceError(
            "a process that tokenizes was killed, maybe because memory ran out; start again, what is tokenized already "
            "is kept (`execution: {threads: 1}` takes the least memory)"
        ) from error
    finally:
        if not waiting:
            pool.shutdown()  # each process ends by itself, and what it has started for its templates with it
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # which has nothing to do any more, or works for nobody
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(tokenizer: PartTokenizer, store: Path) -> None:
    """In a new process, which has nothing to do once the one that asked for it has ended."""
    global _worker
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(tokenizer, PieceStore(store))


def _end_with(process: BaseProcess) -> None:
    """With the whole process: not by the kernel's signal, which comes when the thread that started this one ends."""
    process.join()
    os._exit(1)


def _tokenize(one: DataPart, key: str) -> int:
    """How many rows it has; its pieces are written."""
    num_rows = 0

    def counted() -> Iterator[Row | BadRow]:
        nonlocal num_rows
        for row in read_part(one.part):
            num_rows += 1
            yield row

    _worker.store.write(key, _worker.tokenizer.pieces(one.part, counted()))
    one.state.check(one.part.path, one.part.name)
    return num_rows
