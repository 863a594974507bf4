"""Serves the present champion: `lifecycle serve models:/NAME@champion --follow`.

A proxy listens on the public port; behind it stands the server of the present champion. When the alias moves, a
second server is started; once that is healthy, new requests go there, and the first one ends after its last answer.
For that time, the device must have room for both. An adapter of the same base needs no second server: it is loaded into
the one that runs, and the former one is unloaded after its last answer.

With a canary share, the version that has the alias `challenger` is served beside it, and gets that share of the
requests until the alias is taken away, its server dies, or there is another champion: itself, at best.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from flows.champion import champions, side_by_side
from flows.champion.canary_gate import have_answered, misses
from flows.champion.registrations import only_one
from flows.champion.registry import CHALLENGER, RegisteredVersion, Registry
from flows.champion.serving import Serving, begin_serving, end_serving, is_gone
from stages.core.errors import LifecycleError, TransientError
from stages.serving.backend import Canary
from stages.serving.exchange import Exchange
from stages.serving.lines import say
from stages.serving.listening import listening
from stages.serving.proxy import API_KEY_VARIABLE, Proxy
from stages.serving.server import listening_socket, reachable

POLL_INTERVAL_S = 5.0
LAST_ANSWERS_TIMEOUT_S = 30


class Follower:
    """Serves the version that an alias of a registered model points to, until it is interrupted.

    canary_share: of requests, 0 to 1, that go to the challenger while there is one. gate_requests: after how many of
    each version the challenger is promoted or withdrawn; None leaves that to people.
    """

    def __init__(
        self,
        registry: Registry,
        name: str,
        alias: str,
        canary_share: float = 0.0,
        gate_requests: int | None = None,
    ):
        self._registry = registry
        self._name = name
        self._alias = alias
        self._canary_share = canary_share
        self._gate_requests = gate_requests
        self._servers = ExitStack()
        self._failed: dict[str, str] = {}
        self._last_trouble: dict[str, str] = {}

    def serve(self, host: str, port: int | None, sample: Callable[[Exchange, str], None] | None = None) -> None:
        """Raises StoreError when there is no champion, ResourceError for a taken port, ServerError for a server that
        does not start, or ends by itself. sample: as `Proxy` takes it.
        """
        version = champions.find(self._registry, self._name, self._alias)
        new_key = API_KEY_VARIABLE not in os.environ
        key = os.environ.setdefault(API_KEY_VARIABLE, secrets.token_urlsafe(32))
        with suppress(KeyboardInterrupt), listening_socket(host, port) as public, self._servers:
            champion = begin_serving(version, None, self._servers)
            proxy = Proxy(champion.backend, key, sample)
            with listening(proxy, public, LAST_ANSWERS_TIMEOUT_S):
                print(f"serving {self._name} at http://{reachable(host)}:{public.getsockname()[1]}/v1", flush=True)
                if new_key:
                    print(f"API key: {key}", flush=True)
                challenger: Serving | None = None
                try:
                    while True:
                        champion, challenger = self._next(champion, challenger, proxy)
                        time.sleep(POLL_INTERVAL_S)
                finally:
                    side_by_side.forget(self._name)

    def _next(self, champion: Serving, challenger: Serving | None, proxy: Proxy) -> tuple[Serving, Serving | None]:
        """What is served after the next look at the aliases: the same as before, or others."""
        if not champion.server.alive():
            raise champion.server.failure("ended by itself")
        if challenger and not challenger.server.alive():
            self._failed[CHALLENGER] = challenger.version.number
            say(f"{challenger.server.failure('ended by itself')}\nall requests go to the champion")
            self._withdraw(challenger, champion, proxy)
            challenger = None
        successor = self._moved(self._alias, champion.version)
        if successor:
            if challenger and challenger.version.number != successor.number:
                self._withdraw(challenger, champion, proxy)  # what it was compared with is gone
                challenger = None
            began = challenger or self._begun(self._alias, successor, champion)
            if began:
                if challenger:
                    self._say_side_by_side(proxy)
                champion, challenger = self._succeeded(champion, began, proxy), None
        if self._canary_share:
            challenger = self._next_challenger(champion, challenger, proxy)
        if challenger:
            side_by_side.note(self._name, proxy.side_by_side())
            self._judge(challenger, champion, proxy)
        else:
            side_by_side.forget(self._name)
        return champion, challenger

    def _next_challenger(self, champion: Serving, challenger: Serving | None, proxy: Proxy) -> Serving | None:
        """Who gets a share of the requests after the next look at the alias; None for nobody."""
        try:
            wanted = self._wanted(CHALLENGER)
        except LifecycleError as error:
            self._say_once(CHALLENGER, f"still serving as before: {error}")
            return challenger
        number = wanted.number if wanted and wanted.number != champion.version.number else None
        if challenger and challenger.version.number != number:
            self._withdraw(challenger, champion, proxy)
            challenger = None
        if challenger or not wanted or not number:
            return challenger
        say(f"version {number} of {self._name} is {CHALLENGER} now")
        challenger = self._begun(CHALLENGER, wanted, champion)
        if challenger:
            proxy.set_canary(Canary(challenger.backend, self._canary_share))
            say(f"version {number} of {self._name} gets {self._canary_share:.1%} of the requests")
        return challenger

    def _judge(self, challenger: Serving, champion: Serving, proxy: Proxy) -> None:
        """Move the aliases once enough is known, if that is not left to people; the next look sees it."""
        if not self._gate_requests:
            return
        tallies = [proxy.tallies_of_canary.of(one.served) for one in (challenger, champion)]
        if not have_answered(self._gate_requests, *tallies):
            return
        found = "; ".join(misses(*tallies))
        verdict = f"withdrawn: {found}" if found else "promoted"
        number = challenger.version.number
        say(f"after {self._gate_requests} requests, version {number} of {self._name} is {verdict}")
        try:
            if found:
                self._registry.withdraw_challenger(self._name)
            else:
                with only_one(self._name):
                    self._registry.promote_challenger(self._name)
        except LifecycleError as error:
            self._say_once(CHALLENGER, f"it could not be, and is tried again: {error}")

    def _succeeded(self, champion: Serving, successor: Serving, proxy: Proxy) -> Serving:
        """The successor, once it gets all requests and the former champion has answered its last."""
        proxy.switch(successor.backend)
        say(f"version {successor.version.number} of {self._name} is served")
        end_serving(champion, successor)
        return successor

    def _withdraw(self, challenger: Serving, champion: Serving, proxy: Proxy) -> None:
        proxy.set_canary(None)
        say(f"version {challenger.version.number} of {self._name} gets no requests any more")
        self._say_side_by_side(proxy)
        end_serving(challenger, champion)

    def _say_side_by_side(self, proxy: Proxy) -> None:
        """What a canary that ends was there for."""
        say(f"side by side, of {self._name}:")
        for one in proxy.side_by_side()["versions"]:
            say(json.dumps(one))

    def _moved(self, alias: str, served: RegisteredVersion) -> RegisteredVersion | None:
        """The version that an alias is on now, unless it is the one that is served, or cannot be."""
        try:
            version = self._wanted(alias)
        except LifecycleError as error:
            self._say_once(alias, f"still serving version {served.number} of {self._name}: {error}")
            return None
        if version is None or version.number == served.number:
            return None
        say(f"version {version.number} of {self._name} is {alias} now")
        return version

    def _wanted(self, alias: str) -> RegisteredVersion | None:
        """The version that an alias is on, but for one that could not be served, until the alias was elsewhere."""
        version = self._registry.find(self._name, alias)
        if version is None or version.number != self._failed.get(alias):
            self._failed.pop(alias, None)
            return version
        return None

    def _begun(self, alias: str, version: RegisteredVersion, champion: Serving) -> Serving | None:
        """The server of a version, healthy; None when it cannot be served."""
        self._failed[alias] = version.number
        try:
            serving = begin_serving(version, champion, self._servers)
        except LifecycleError as error:
            if isinstance(error, TransientError) and is_gone(champion.server):
                doing = f"ended while it was to load another version of {self._name}, and nothing is served"
                raise champion.server.failure(doing) from error
            self._say_once(
                alias,
                f"still serving version {champion.version.number} of {self._name}: {error}\n"
                f"it is tried again when {alias} has been moved away and back",
            )
            return None
        del self._failed[alias]
        return serving

    def _say_once(self, alias: str, trouble: str) -> None:
        if trouble != self._last_trouble.get(alias):
            say(trouble)
        self._last_trouble[alias] = trouble
