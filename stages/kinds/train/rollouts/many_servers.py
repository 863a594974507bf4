"""Several sampling servers of one model, which others started: they share a round's prompts, and its losses.

A server that dies or hangs is left out until the next weights; what it was asked is asked of the others, with the same
seeds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Never

from stages.core.errors import LifecycleError, ServerError, TransientError
from stages.core.lines import counted
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.rollouts.documents import AnsweredPrompt
from stages.kinds.train.rollouts.server import (
    ENDING,
    MOST_RESTARTS,
    POLL_INTERVAL_S,
    ExternalServer,
    predictions_of,
)
from stages.models.recorded import Predicted
from stages.rollouts.asking import Answer, Request, ask_all
from stages.serving.client import Client
from stages.serving.held_weights import HeldWeights


class ManyServers:
    """Sampling servers that the recipe names, as rank 0 uses them (`PolicyServer`): all have the same weights."""

    def __init__(self, hosts: Sequence[ExternalServer], execution: TrainExecution, warn: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._execution, self._warn = execution, warn
        self._ready: list[ExternalServer] = []
        self._folder: Path | None = None
        self._is_given_up = False
        self._recoveries = 0
        self._preparing = Lock()

    def take(self, folder: Path) -> None:
        """Load the weights in `folder` into all servers, and remove the former folder.

        All must be there the first time; later those that do not answer are left out, with a warning. Raises
        ServerError for one that refuses the first weights, TransientError when none answers in time.
        """
        before, self._folder = self._folder, folder
        if before is None:
            for host in self._hosts:
                with host.opened(folder):
                    self._ready.append(host)
            return
        errors = self._of_each(self._hosts, self._give)
        self._ready = [host for host, error in zip(self._hosts, errors, strict=True) if error is None]
        for host, error in zip(self._hosts, errors, strict=True):
            if error:
                self._warn(f"the server that samples, {host.client.url}, is left out of the next round: {error}")
        self._keep_some()
        shutil.rmtree(before, ignore_errors=True)

    def take_held(self, held: HeldWeights) -> Never:
        raise AssertionError("servers that others started get folders")

    def forget(self) -> None:
        """Do nothing, since weights lie in a folder."""

    def rest(self) -> None:
        """Do nothing, since these servers have devices of their own."""

    def give_up(self) -> None:
        self._is_given_up = True

    def close(self) -> None:
        """Forget the servers, which go on."""
        self._ready = []

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        """Send requests to the servers in turn, each whole to one, and call `keep` as `RolloutServer.ask` does.

        Raises ServerError for a request that is refused, TransientError when all servers fail repeatedly.
        """
        remaining, lock = dict(requests), Lock()

        def kept(number: int, request: Request, answer: Answer) -> None:
            if self._is_given_up:
                raise TransientError(ENDING)
            with lock:
                keep(number, request, answer)
                # from here on the answer is kept, and no other server is asked for it
                del remaining[number]

        while remaining:
            hosts = list(self._ready)
            shares = {host: list(remaining.items())[place :: len(hosts)] for place, host in enumerate(hosts)}
            errors = self._of_each(hosts, lambda host: self._ask_one(host, shares[host], kept))  # noqa: B023
            for host, error in zip(hosts, errors, strict=True):
                if error is None:
                    continue
                # A healthy server refused the request itself; another would refuse it, too.
                if self._is_given_up or (isinstance(error, ServerError) and host.client.is_healthy()):
                    raise error
                left = sum(number in remaining for number, _ in shares[host])
                self._leave_out(host, error, f"{counted(left, 'prompt')} of its {len(shares[host])}")
            self._keep_some()
        self._recoveries = 0

    def predictions(self, documents: Sequence[AnsweredPrompt]) -> Iterator[tuple[str, list[Predicted]]]:
        """Yield each server's address, for messages, and its log-probabilities of all tokens of documents."""
        num_answers = 0
        while not num_answers:
            for host in list(self._ready):
                try:
                    rows = predictions_of(host, self._client(host), documents)
                except (ServerError, TransientError) as error:
                    self._leave_out(host, error, "the probe")
                else:
                    num_answers += 1
                    yield f"the server {host.client.url}", rows
            self._keep_some()

    def _client(self, host: ExternalServer) -> Client:
        assert self._folder
        model = host.name_of(self._folder) if host.is_adapter else host.client.model
        return replace(host.client, model=model)

    def _ask_one(
        self,
        host: ExternalServer,
        share: Sequence[tuple[int, Request]],
        kept: Callable[[int, Request, Answer], None],
    ) -> None:
        client = self._client(host)
        named = [(number, {**request, "model": client.model}) for number, request in share]
        if named:
            num_concurrent = self._execution.concurrent_requests
            ask_all(client, named, num_concurrent, kept, stall_s=client.timeout_s, server=host)

    def _give(self, host: ExternalServer) -> None:
        """Give a server the weights in the folder; one that was left out is checked first, since it may be another."""
        assert self._folder
        if host not in self._ready:
            if not host.client.is_healthy():
                raise TransientError("it does not answer")
            host.check()
        with self._preparing:
            host.prepare(self._folder)
        host.load(host, self._folder)

    def _leave_out(self, host: ExternalServer, error: LifecycleError, asked: str) -> None:
        self._ready.remove(host)
        self._warn(
            f"the server that samples, {host.client.url}, is left out of this round, and {asked} asked of the others, "
            f"with the same seeds: {error}"
        )

    def _keep_some(self) -> None:
        """Wait, if no server is left, until one answers again and has the weights; TransientError if none does."""
        if self._ready:
            return
        self._recoveries += 1
        since_s, why = time.monotonic(), "they failed too often"
        while self._recoveries <= MOST_RESTARTS and time.monotonic() - since_s < self._hosts[0].ready_timeout_s:
            errors = self._of_each(self._hosts, self._give)
            self._ready = [host for host, failed in zip(self._hosts, errors, strict=True) if failed is None]
            if self._ready or self._is_given_up:
                return
            why = "; ".join(sorted({str(failed) for failed in errors}))
            time.sleep(POLL_INTERVAL_S)
        raise TransientError(
            f"none of the {len(self._hosts)} servers that sample, {self._hosts[0].client.url} and others, is left "
            f"after {time.monotonic() - since_s:.0f} s (execution.ready_timeout_s): {why}; start them again"
        )

    def _of_each(
        self, hosts: Sequence[ExternalServer], call: Callable[[ExternalServer], None]
    ) -> list[ServerError | TransientError | None]:
        """Call a function with every server at the same time, and return what each raised."""

        def error_of(host: ExternalServer) -> ServerError | TransientError | None:
            try:
                call(host)
            except (ServerError, TransientError) as error:
                return error
            return None

        with ThreadPoolExecutor(len(hosts)) as threads:
            return list(threads.map(error_of, hosts))
