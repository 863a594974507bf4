"""A champion that is an adapter: served beside one that changes nothing, and exchanged in the running server.

Each version has a name of its own in its server, such as `adder@3`; the proxy knows it by the registered name. Whether
a version is what was trained is checked before the proxy sends requests to it. What it is compared with is an adapter
without effect, since vLLM answers for the base itself only while a slot is empty.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flows.champion import champions
from flows.champion.registry import RegisteredVersion
from stages.adapters.idle import write_idle_adapter
from stages.core.errors import LifecycleError
from stages.serving.agreement import compare_with_records
from stages.serving.backend import Naming
from stages.serving.client import check_server
from stages.serving.launch import LaunchSpec
from stages.serving.lines import say
from stages.serving.server import Server


def swapping_spec(version: RegisteredVersion, idle: Path) -> LaunchSpec:
    """How to serve a version so that other adapters can take its place. Of a whole model: as it always is.

    idle: where an adapter without effect is written.
    """
    spec = champions.launch_spec(version)
    if not spec.adapters:
        return spec
    naming, folder = naming_of(version), spec.adapters[version.name]
    write_idle_adapter(folder, idle)
    adapters = {naming.inside: folder, _idle_name(spec): idle}
    return spec.model_copy(update={"served_name": naming.inside, "adapters": adapters, "swaps_adapters": True})


def naming_of(version: RegisteredVersion) -> Naming:
    """How an adapter's registered name is called in its server."""
    return Naming(public=version.name, inside=f"{version.name}@{version.number}")


def swap_in(server: Server, version: RegisteredVersion) -> bool:
    """Load a version into a running server and check it; whether it could be, since the server is that of its base.

    Raises what loading and checking raise; the server is as it was before then.
    """
    spec, running, naming = champions.launch_spec(version), server.spec, naming_of(version)
    same_server = (spec.model, spec.serving, spec.engine) == (running.model, running.serving, running.engine)
    if not (running.swaps_adapters and spec.adapters and same_server):
        return False
    folder = spec.adapters[version.name]
    if not server.engine.has_room(running, folder):
        return False
    began_s = time.monotonic()
    server.engine.load_adapter(server.address, server.api_key, naming.inside, folder, server.client.timeout_s)
    try:
        check_adapter(server, naming.inside, folder)
    except LifecycleError:
        with suppress(LifecycleError):  # what was wrong is said; a server that is gone has nothing to forget
            server.engine.unload_adapter(server.address, server.api_key, naming.inside, server.client.timeout_s)
        raise
    say(f"version {version.number} of {version.name} was loaded and checked in {time.monotonic() - began_s:.2f} s")
    return True


def check_adapter(server: Server, name: str, folder: Path) -> None:
    """Raise ServerError unless an adapter of a server that swaps them is listed, answers, and is what was trained."""
    client = replace(server.client, model=name)
    check_server(client, server.engine.smoke_log_probabilities)
    spec = server.spec.model_copy(update={"adapters": {**server.spec.adapters, name: folder}})
    context_tokens = server.engine.context_tokens(client, spec)
    agreements = compare_with_records(client, spec, [name], context_tokens, say, _idle_name(server.spec))
    for one in agreements.values():
        say(f"{name} differs from what training recorded by {one.from_training.most:.2g} nats per token at most")


def _idle_name(spec: LaunchSpec) -> str:
    return f"{spec.own_name}-idle"
