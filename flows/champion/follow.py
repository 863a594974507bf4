"""Server that always serves the current champion: `lifecycle serve models:/NAME@champion --follow`.

A proxy listens on the public port; behind it is the engine of the present champion. When the alias moves, a second
engine is started; once that is healthy, new requests go there, and the first one ends after its last answer. For that
time, the device must have room for both. An adapter of the same base is loaded into the running engine instead, and the
former adapter is unloaded after its last answer.

With a canary share, the version that has the alias `challenger` gets that share of the requests until the alias is
removed, its engine dies, or the champion changes (perhaps to the challenger). The canary gate compares errors and
latency, not answers: those were judged when the challenger was a candidate (`kind: promote`).

A champion's engine that dies is restarted, at once or after a growing pause if it dies again and again; requests wait
for it. One version is started at a time, the most urgent (`Follower._missing`): a less urgent start is stopped, and
begins again afterwards.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Self

from flows.champion import champions, servers_folder
from flows.champion.registrations import promotion_lock
from flows.champion.registry import CHALLENGER, RegisteredVersion, Registry
from flows.champion.servers_folder import own_folder
from flows.champion.serving import EngineStart, RunningVersion, end_dead, end_serving, in_background, start_engine
from flows.ledger.home import home
from stages.core.errors import ApprovalError, LifecycleError
from stages.core.lines import print_line, print_timed
from stages.serving.backend import Canary
from stages.serving.people import People
from stages.serving.person_keys import keys_folder
from stages.serving.proxy import API_KEY_VARIABLE, Proxy, Sampler, listening
from stages.serving.server import reachable
from stages.serving.tally import Tally
from stages.serving.waiting import RequestQueue

LOOK_INTERVAL_S = 5.0
MAX_MORE_ERRORS = 0.01
"""Largest amount by which the challenger's share of failed requests may exceed the champion's."""
MAX_TIMES_SLOWER = 1.25
"""Largest ratio of the challenger's to the champion's latency, each at the 95th percentile of requests."""
MAX_AT_ONCE = 2
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
"""Seconds of running after which an engine counts as stable: its next death is counted as the first in a row again."""
STEP_INTERVAL_S = 0.1
LAST_ANSWERS_TIMEOUT_S = 30
MAX_DEATHS_WITH = 2
"""Number of engine deaths, with an adapter loaded or being loaded, after which that adapter is no longer served."""


@dataclass(frozen=True)
class FollowSettings:
    """Settings of `lifecycle serve --follow`: the alias of a registered model to serve, and how to run a canary.

    canary_share: share of requests, 0 to 1, for the challenger. gate_requests: number of requests of each version after
    which the challenger is promoted or withdrawn; None leaves that to people.
    """

    registry: Registry
    name: str
    alias: str
    canary_share: float = 0.0
    gate_requests: int | None = None

    def serve(self, host: str, public: socket, sampler: Sampler | None = None) -> None:
        """Serve the model version that the alias points to on a listening socket, until interrupted.

        The API key is in VLLM_API_KEY; sampler: as for `Proxy`.
        Raises StoreError when there is no champion, ServerError for an engine that does not start.
        """
        version = champions.find(self.registry, self.name, self.alias)
        people = People(keys_folder(home()))
        with suppress(KeyboardInterrupt), public, own_folder() as folder, people:
            # The socket listens already: clients wait in its queue until the proxy accepts them below.
            champion = start_engine(version, folder)
            proxy = Proxy(champion.backend, os.environ[API_KEY_VARIABLE], sampler, RequestQueue(), people)
            with Follower(self, champion, proxy, folder) as follower, listening(proxy, public, LAST_ANSWERS_TIMEOUT_S):
                print_line(f"serving {self.name} at http://{reachable(host)}:{public.getsockname()[1]}/v1")
                while True:
                    follower.step()
                    time.sleep(STEP_INTERVAL_S)


class Follower:
    """State machine that keeps served champion and challenger in step with MLflow's aliases and engine failures.

    All that takes time runs in threads. folder: as for `start_engine`.
    """

    def __init__(self, following: FollowSettings, champion: RunningVersion, proxy: Proxy, folder: Path):
        self.following = following
        self.champion = champion
        self.challenger: RunningVersion | None = None
        aliases = (following.alias, *([CHALLENGER] if following.canary_share else []))
        self.aliases = AliasWatcher(following.registry, following.name, aliases)
        self._proxy = proxy
        self._folder = folder
        self._restarts = RestartBackoff()
        self._start: EngineStart | None = None
        self._stopping: list[Future[None]] = []
        """Tasks that remove dead engines and stopped engine starts. No engine starts before they are done."""
        self._ending: list[Future[None]] = []
        """Tasks that stop replaced versions after their last responses; meanwhile only champions' engines may start."""
        self._judging: Future[None] | None = None
        self._is_over = threading.Event()
        self._deaths_with: Counter[str] = Counter()
        self._announced: dict[str, str | None] = {}
        self._last_trouble: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all inference engines, those that are still starting included."""
        # First: what waits for last answers gives up.
        self._is_over.set()
        if self._start:
            self._stop_start()
        wait([*self._stopping, *self._ending])
        for serving in (self.challenger, self.champion):
            if serving:
                serving.stack.close()
        servers_folder.forget_tallies(self.following.name)

    @property
    def is_settled(self) -> bool:
        """Return whether serving is settled: no engine starts or ends, and no decision about the canary is pending."""
        return not (self._start or self._stopping or self._ending or self._judging)

    def step(self) -> bool:
        """Do one round without waiting: deaths, finished starts, moved aliases; return whether MLflow has reported."""
        # The order matters: deaths, finished starts and moved aliases decide what is missing and has to be started.
        self._see_deaths()
        self._see_what_was_started()
        has_aliases = self._see_aliases()
        self._see_what_was_stopped()
        self._start_what_is_missing()
        if has_aliases:
            self._compare()
        return has_aliases

    def _missing(self) -> Iterator[RegisteredVersion]:
        """Yield the model versions that should be served and are not, the most urgent first."""
        champion, is_dead = self.champion.version, self.champion.died.is_set()
        if is_dead and self._restarts.is_at_once:
            yield champion
        if successor := self._successor():
            yield successor  # before a champion that dies repeatedly: the successor may be the fix
        if is_dead and self._restarts.is_due:
            yield champion
        challenger = self._wanted_challenger()
        if challenger and not self.challenger and not is_dead:
            yield challenger

    def _successor(self) -> RegisteredVersion | None:
        version = self.aliases.version(self.following.alias)
        return version if version and version.number != self.champion.version.number else None

    def _wanted_challenger(self) -> RegisteredVersion | None:
        version = self.aliases.version(CHALLENGER)
        return version if version and version.number != self.champion.version.number else None

    def _start_what_is_missing(self) -> None:
        missing = next(self._missing(), None)
        # What is starting is no longer wanted, or something more urgent is missing.
        if self._start and (missing is None or missing.number != self._start.version.number):
            print_timed(f"the start of version {self._start.version.number} of {self.following.name} is stopped")
            self._stop_start()
        is_champion = missing is self.champion.version
        # During a switch the device holds two engines already; a third may find no room.
        if missing and not self._start and (is_champion or not self._ending):
            running = None if self.champion.died.is_set() else self.champion
            self._start = EngineStart(missing, running, self._folder, self._stopping)

    def _stop_start(self) -> None:
        assert self._start
        self._stopping.append(self._start.stop())
        self._start = None

    # ------------------------------------------------------------------------------------------- events

    def _see_deaths(self) -> None:
        champion, challenger = self.champion, self.challenger
        if champion.died.is_set() and not champion.backend.is_gone:
            # Set once for each death: the next round passes over it.
            champion.backend.is_gone = True
            print_timed(str(champion.server.failure("ended by itself")))
            if self._start and self._start.loads_into is champion:
                self._note_death_with(self._start.version)
            if challenger and challenger.server is champion.server:
                self._note_death_with(challenger.version)
            self._stopping.append(in_background(lambda: end_dead(champion)))
            self._say_restart(self._restarts.add(time.monotonic() - champion.began_s))
        if challenger and challenger.died.is_set():
            challenger.backend.is_gone = True
            # It had an engine of its own; deaths of a shared engine are counted by `_note_death_with`.
            if challenger.server is not champion.server:
                self.aliases.refuse(CHALLENGER, challenger.version)
                print_timed(f"{challenger.server.failure('ended by itself')}\nall requests go to the champion")
            self._withdraw(challenger)

    def _note_death_with(self, version: RegisteredVersion) -> None:
        self._deaths_with[version.number] += 1
        if self._deaths_with[version.number] >= MAX_DEATHS_WITH:
            for alias in (self.following.alias, CHALLENGER):
                aliased = self.aliases.version(alias)
                if aliased and aliased.number == version.number:
                    self._refuse(alias, version, f"the engine has died {MAX_DEATHS_WITH} times while it was in it")

    def _see_what_was_started(self) -> None:
        start = self._start
        if start is None or not start.outcome.done():
            return
        self._start = None
        try:
            serving = start.outcome.result()
        except (LifecycleError, OSError) as error:
            self._see_failure(start, error)
            return
        number, successor = serving.version.number, self._successor()
        if serving.died is self.champion.died and serving.died.is_set():
            return  # the engine that it was loaded into has died since: the start is repeated
        if number == self.champion.version.number:
            self.champion = serving
            self._proxy.switch(serving.backend)
            print_timed(f"version {number} of {self.following.name} is served again")
        elif successor and successor.number == number:
            self._succeed(serving)
        else:
            self.challenger, share = serving, self.following.canary_share
            self._proxy.set_canary(Canary(serving.backend, share))
            print_timed(f"version {number} of {self.following.name} gets {share:.1%} of the requests")

    def _see_failure(self, start: EngineStart, error: Exception) -> None:
        successor = self._successor()
        if start.version.number == self.champion.version.number:
            print_timed(f"version {start.version.number} of {self.following.name} could not be started again: {error}")
            self._say_restart(self._restarts.add(lived_s=0.0))
        elif start.loads_into and start.loads_into.died.is_set():
            pass  # `_see_deaths` has noted the engine's death: the start is repeated
        elif successor and successor.number == start.version.number:
            self._refuse(self.following.alias, start.version, str(error))
        else:
            self._refuse(CHALLENGER, start.version, str(error))

    def _see_aliases(self) -> bool:
        """Crown or withdraw the challenger when aliases have moved; return whether MLflow has reported any."""
        aliases = self.aliases.look()
        for alias, version in aliases.items():
            self._announce(alias, version)
        successor, challenger = self._successor(), self.challenger
        if challenger:
            next_challenger = self._wanted_challenger()
            if successor and successor.number == challenger.version.number:
                self._say_side_by_side()
                self._succeed(challenger)
                self.challenger = None
            elif successor or next_challenger is None or next_challenger.number != challenger.version.number:
                self._withdraw(challenger)  # with a successor, the champion that it was compared with will be gone
        return bool(aliases)

    def _see_what_was_stopped(self) -> None:
        self._stopping = [one for one in self._stopping if not _is_done(one)]
        self._ending = [one for one in self._ending if not _is_done(one)]
        if self._judging and self._judging.done():
            judged, self._judging = self._judging, None
            try:
                judged.result()
            except ApprovalError as error:
                self._say_once("verdict", str(error))
            except LifecycleError as error:
                self._say_once("verdict", f"moving the aliases failed, and is tried again: {error}")

    # ------------------------------------------------------------------------------------------- consequences

    def _succeed(self, successor: RunningVersion) -> None:
        """Send all requests to a new champion's engine, and end the former champion after its last response."""
        former, self.champion = self.champion, successor
        self._proxy.switch(successor.backend)
        print_timed(f"version {successor.version.number} of {self.following.name} is served")
        # The deaths so far were those of the former champion.
        self._restarts = RestartBackoff()
        if not former.backend.is_gone:
            self._end(former)

    def _withdraw(self, challenger: RunningVersion) -> None:
        self.challenger = None
        self._proxy.set_canary(None)
        print_timed(f"version {challenger.version.number} of {self.following.name} gets no requests any more")
        self._say_side_by_side()
        self._end(challenger)

    def _end(self, former: RunningVersion) -> None:
        is_shared = former.server is self.champion.server
        self._ending.append(in_background(lambda: end_serving(former, is_shared, self._is_over)))

    def _compare(self) -> None:
        """Record the canary's request counts; promote or withdraw the challenger after enough requests."""
        if self.challenger is None:
            servers_folder.forget_tallies(self.following.name)
            return
        servers_folder.note_tallies(self.following.name, self._proxy.side_by_side())
        num_requests, name = self.following.gate_requests, self.following.name
        tallies = [self._proxy.tallies_of_canary.of(one.served) for one in (self.challenger, self.champion)]
        if num_requests is None or self._judging or not have_answered(num_requests, *tallies):
            return
        reasons = "; ".join(exceeded_limits(*tallies))
        verdict = f"withdrawn: {reasons}" if reasons else "to be promoted"
        number = self.challenger.version.number
        self._say_once("gate", f"after {num_requests} requests, version {number} of {name} is {verdict}")
        registry = self.following.registry
        self._judging = in_background(
            lambda: registry.withdraw_challenger(name) if reasons else _promote_challenger(registry, name)
        )

    # ------------------------------------------------------------------------------------------- messages

    def _announce(self, alias: str, version: RegisteredVersion | LifecycleError | None) -> None:
        if isinstance(version, LifecycleError):
            self._say_once(alias, f"still serving as before: {version}")
            return
        self._last_trouble.pop(alias, None)
        number = version.number if version else None
        if number != self._announced.get(alias, self.champion.version.number) and number:
            print_timed(f"version {number} of {self.following.name} is {alias} now")
        self._announced[alias] = number

    def _refuse(self, alias: str, version: RegisteredVersion, why: str) -> None:
        self.aliases.refuse(alias, version)
        served = f"version {self.champion.version.number} of {self.following.name}"
        again = f"version {version.number} is tried again when {alias} has been moved away and back"
        print_timed(f"still serving {served}: {why}\n{again}")

    def _say_restart(self, pause_s: float) -> None:
        when = f"in {pause_s:.0f} s" if pause_s else "now"
        times = f", after {self._restarts.num_deaths} deaths in a row" if self._restarts.num_deaths > 1 else ""
        print_timed(f"version {self.champion.version.number} of {self.following.name} is started again {when}{times}")

    def _say_side_by_side(self) -> None:
        """Print the request counts of champion and challenger when the canary ends."""
        print_timed(f"side by side, of {self.following.name}:")
        for one in self._proxy.side_by_side()["versions"]:
            print_timed(json.dumps(one))

    def _say_once(self, about: str, trouble: str) -> None:
        if trouble != self._last_trouble.get(about):
            print_timed(trouble)
        self._last_trouble[about] = trouble


class AliasWatcher:
    """Aliases of a registered model as MLflow last reported them, queried in a thread: MLflow may hang."""

    def __init__(self, registry: Registry, name: str, aliases: Iterable[str]):
        self._registry = registry
        self._name = name
        self._versions: dict[str, RegisteredVersion | None] = dict.fromkeys(aliases)
        self._refused: dict[str, str] = {}
        self._next_look_s = 0.0
        self._looking: Future[dict[str, RegisteredVersion | LifecycleError | None]] | None = None

    def look(self) -> dict[str, RegisteredVersion | LifecycleError | None]:
        """Return the aliases reported since the last call, usually none; start the next query when due. Never waits."""
        if self._looking is None:
            if time.monotonic() >= self._next_look_s:
                self._looking = in_background(self._asked)
            return {}
        if not self._looking.done():
            return {}
        reported, self._looking = self._looking.result(), None
        self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
        for alias, version in reported.items():
            # An alias that could not be looked up stays as MLflow last reported it.
            if not isinstance(version, LifecycleError):
                self._versions[alias] = version
                # Moved away: when it comes back, the version is tried again.
                if version is None or version.number != self._refused.get(alias):
                    self._refused.pop(alias, None)
        return reported

    def version(self, alias: str) -> RegisteredVersion | None:
        """Return the model version that an alias points to; None when it is unset, or the version was refused."""
        version = self._versions.get(alias)
        return version if version and version.number != self._refused.get(alias) else None

    def refuse(self, alias: str, version: RegisteredVersion) -> None:
        """Treat an alias as unset while it points to a version that cannot be served."""
        self._refused[alias] = version.number

    def _asked(self) -> dict[str, RegisteredVersion | LifecycleError | None]:
        answers: dict[str, RegisteredVersion | LifecycleError | None] = {}
        for alias in self._versions:
            try:
                answers[alias] = self._registry.find(self._name, alias)
            except LifecycleError as error:
                answers[alias] = error
        return answers


class RestartBackoff:
    """Pause before an engine's next restart, which grows with the number of deaths in a row."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self._due_s = 0.0

    def add(self, lived_s: float) -> float:
        """Count an engine's death or failed start after `lived_s` of answering; return the seconds to wait."""
        self.num_deaths = 1 if lived_s > STEADY_S else self.num_deaths + 1
        # Deaths in a row 1, 2, 3, 4, … -> pauses of 0, 0, 2, 4, … 60 s.
        pause_s = 0.0 if self.is_at_once else min(2.0 ** (self.num_deaths - MAX_AT_ONCE), LONGEST_PAUSE_S)
        self._due_s = time.monotonic() + pause_s
        return pause_s

    @property
    def is_at_once(self) -> bool:
        """Return whether the next start of an engine comes without a pause."""
        return self.num_deaths <= MAX_AT_ONCE

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s


def have_answered(num_requests: int, *tallies: Tally) -> bool:
    """Return whether champion and challenger have each answered at least `num_requests` requests, errors included."""
    return all(tally.num_requests >= num_requests for tally in tallies)


def exceeded_limits(challenger: Tally, champion: Tally) -> Iterator[str]:
    """Yield a sentence for each limit on errors or latency that the challenger exceeds against the champion."""
    shares = [tally.num_errors / tally.num_requests for tally in (challenger, champion)]
    if shares[0] > shares[1] + MAX_MORE_ERRORS:
        yield f"{shares[0]:.1%} of its requests failed, and {shares[1]:.1%} of the champion's"
    latencies_s = [tally.latency_s(95) for tally in (challenger, champion)]
    if latencies_s[0] and latencies_s[1] and latencies_s[0] > latencies_s[1] * MAX_TIMES_SLOWER:
        yield f"its p95 is {latencies_s[0]:.3g} s, and the champion's {latencies_s[1]:.3g} s"


def _is_done(ended: Future[None]) -> bool:
    """Return whether a background task has ended. Raises the exception with which it ended."""
    if ended.done():
        ended.result()
    return ended.done()


def _promote_challenger(registry: Registry, name: str) -> None:
    """Make the challenger champion. Raises ApprovalError where a person must approve that."""
    if groups := registry.approvers(name):
        raise ApprovalError(
            f"it waits for approval by {' or '.join(groups)}: lifecycle canary {name} --promote --why REASON"
        )
    with promotion_lock(name):
        registry.promote_challenger(name)
