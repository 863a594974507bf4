"""Pool of processes that work on items side by side, whose results come in the order of the items.

Each is a new interpreter (multiprocessing's `spawn`): a fork of this process would have its locks without its threads,
and multiprocessing's `forkserver` stays for as long as training, and leaves a folder when this process is killed. They
end when the process that started them does.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from stages.core.errors import ResourceError

MAX_PROCESSES = 64
ITEMS_AHEAD = 4
"""Number of items queued for each process, so that none waits for work."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_processes(num_bytes: int, bytes_per_process: int) -> int:
    """Return how many processes should read this many bytes: at most one per core of the stage.

    bytes_per_process: smallest number of bytes for which a further process is worth its start.
    """
    threads, ranks = os.environ.get("OMP_NUM_THREADS"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    if threads and threads.isdecimal():
        cores = min(cores, int(threads) * ranks)  # the threads are of one rank
    return max(1, min(cores, MAX_PROCESSES, num_bytes // bytes_per_process))


def worked(
    work: Callable[[Item], Result], items: Iterable[Item], processes: int, kept: str
) -> Generator[tuple[Item, Result]]:
    """Yield each item with what `work` returns for it in one of several processes, in the order of the items.

    work: sent to each process once, by pickle. kept: clause of the error's message on what a further start of the stage
    finds, such as "curation goes on where it was". Raises what `work` raises of the first bad item, and ResourceError
    when a process is killed.
    """
    context = multiprocessing.get_context("spawn")
    # Children that are not the pool's, which has no public list of its own.
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (work,))
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    todo = iter(items)
    try:
        while True:
            # `todo` is an iterator: each round goes on where the last one stopped.
            for item in todo:
                waiting.append((item, pool.submit(_work_on, item)))
                if len(waiting) >= ITEMS_AHEAD * processes:
                    break
            if not waiting:
                break
            item, done = waiting.popleft()
            # In the order of the items, not in that of their ends.
            yield item, done.result()
    except BrokenProcessPool as error:
        raise ResourceError(
            f"a process that reads rows was killed, maybe because memory ran out; start again, {kept} "
            "(`execution: {threads: 1}` takes the least memory)"
        ) from error
    finally:
        if not waiting:
            pool.shutdown()  # each process ends by itself, and what it has started with it
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # idle by now, or its work is no longer wanted
        pool.shutdown(wait=True, cancel_futures=True)


_work: Callable[..., Any]


def _begin(work: Callable[..., object]) -> None:
    """Take over the pool's work in a new process of it, and make the process end when its parent does."""
    global _work
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    # One thread a process: the pool has a process for each core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work = work


def _end_with(process: BaseProcess) -> None:
    """Wait for the parent process's end, then exit: PR_SET_PDEATHSIG would come when the starting thread ends."""
    process.join()
    os._exit(1)


def _work_on(item: object) -> Any:
    return _work(item)
