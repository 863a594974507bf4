"""Keeps one server up for a person: `python -m stages.serve MODEL_FOLDER [--name NAME] [--port PORT] …`.

Prints `serving NAME at URL` once the server is ready, and goes on until it is interrupted. The API key is VLLM_API_KEY
in the environment; where that is not set, a new key is made and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from stages.core.errors import LifecycleError, RecipeError
from stages.serve.chat import chat
from stages.serve.run import guard
from stages.serving.agreement import compare_with_records
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.launch import LaunchSpec
from stages.serving.lines import say, starting_lines
from stages.serving.registry import new_launch_spec
from stages.serving.server import API_KEY_VARIABLE, started_server


def main() -> None:
    """Serve until SIGINT or SIGTERM; exits with the code of the error class otherwise."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background programs deaf to the first
        signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _serve(_parse())
    except LifecycleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.serve", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder of the model")
    parser.add_argument("--name", help="of the model, or of an adapter, in requests; default: the folder's name")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER", help="an adapter of the model")
    parser.add_argument("--base-name", help="of the model where --name is an adapter's; default: NAME-base")
    parser.add_argument("--version", help="of a registered model or an artifact, for the metrics")
    parser.add_argument("--host", default=ServeExecution().host, help="default: this machine only")
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--chat", action="store_true", help="talk to it here; its end is the server's")
    parser.add_argument("--serving", default="{}", help="`serving` block of a recipe, as JSON")
    return parser.parse_args()


def _serve(arguments: argparse.Namespace) -> None:
    spec, execution = _read(arguments)
    folder = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve() / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    log_file = folder / f"{spec.served_name}.log"
    runtime = folder / f"{spec.served_name}-{os.getpid()}"
    with started_server(spec, execution, log_file, runtime, version=arguments.version) as server:
        say(f"starting {server.engine.title} {spec.engine_version} for {spec.model}; its log is {log_file}")
        server.wait_until_ready(execution.ready_timeout_s, starting_lines(server.engine.title))
        server.check()
        compare_with_records(server.client, spec, spec.folders, server.engine.context_tokens(server.client, spec), say)
        names = sorted(spec.folders, key=lambda name: name != spec.served_name)
        print(f"serving {', '.join(names)} at {server.url}/v1", flush=True)
        if arguments.chat:
            chat(server.client)
            return
        if API_KEY_VARIABLE not in os.environ:
            print(f"API key: {server.api_key}", flush=True)
        guard(server)


def _read(arguments: argparse.Namespace) -> tuple[LaunchSpec, ServeExecution]:
    model = arguments.model.resolve()
    name = arguments.name or model.name
    adapters: dict[str, Path] = {}
    for given in arguments.adapter:
        own_name, equals, folder = given.partition("=")
        if not equals or own_name in adapters:
            raise RecipeError(f"--adapter: found {given}, expected NAME=FOLDER, and every name once")
        adapters[own_name] = Path(folder).resolve()
    try:
        serving = ServingConfig.model_validate_json(arguments.serving)
        execution = ServeExecution(host=arguments.host, port=arguments.port)
    except ValidationError as error:
        raise RecipeError(f"the options for the server are wrong: {error}") from error
    base_name = arguments.base_name or f"{name}-base" if name in adapters else None
    return new_launch_spec(model, name, serving, adapters=adapters, base_name=base_name), execution


if __name__ == "__main__":
    main()
