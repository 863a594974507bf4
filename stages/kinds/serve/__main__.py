"""Program that serves one model: `python -m stages.kinds.serve MODEL_FOLDER [--name NAME] [--port PORT] …`.

Prints `serving NAME at URL` once the server is ready, and goes on until it is interrupted. The API key is VLLM_API_KEY
in the environment, else a new one that is printed.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.core.errors import LifecycleError, RecipeError
from stages.core.lines import print_line, print_timed, starting_lines
from stages.kinds.serve.chat import Conversation, chat, read_medium, sampling_of
from stages.kinds.serve.run import guard
from stages.models.media import KINDS, NOUNS, MediaKind
from stages.serving.agreement import compare_with_records
from stages.serving.config import ServeExecution, ServingConfig, Speculation
from stages.serving.engine import LaunchSpec
from stages.serving.people import People
from stages.serving.person_keys import keys_folder
from stages.serving.registry import new_launch_spec
from stages.serving.server import API_KEY_VARIABLE, Server, started_server

SERVED: dict[MediaKind, str] = {
    "image": "a model with a processor of pictures",
    "video": "a Qwen3-VL that learned from rows with them",
    "audio": "a model that learned from rows with them",
}
"""Models that are served with the media of each kind."""


def main() -> None:
    """Serve until SIGINT or SIGTERM; exits with the error's exit code if the server fails."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has background programs ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _serve(_parse())
    except LifecycleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _parse(argument_list: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.kinds.serve", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the model in Hugging Face's format")
    parser.add_argument("--name", help="name of the model or adapter in requests; default: the folder's name")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="name and folder of an adapter of the model; may be given several times",
    )
    parser.add_argument(
        "--base-name", help="name of the model itself in requests, if --name is an adapter's; default: NAME-base"
    )
    parser.add_argument("--version", help="version of the model, as a label of the server's metrics")
    parser.add_argument(
        "--host", default=ServeExecution().host, help="address to listen on; default: 127.0.0.1, for this machine only"
    )
    parser.add_argument("--port", type=int, help="port to listen on; default: a free one")
    parser.add_argument(
        "--chat", action="store_true", help="chat in this terminal; the server stops when the chat ends"
    )
    parser.add_argument(
        "--beside",
        metavar="JSON",
        help="arguments for a second server, as a JSON list; with --chat, both models answer every question",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature of --chat; default: from the model's generation_config.json",
    )
    parser.add_argument("--max-tokens", type=int, help="largest number of tokens in each answer of --chat")
    parser.add_argument("--system", help="system message at the beginning of each conversation of --chat")
    for kind, noun in NOUNS.items():
        parser.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help=f"{noun} before the first question of each conversation of --chat; may be given several times",
        )
    parser.add_argument(
        "--serving",
        help="server settings as the JSON of a recipe's `serving` block; without them, "
        "the server starts fast for a short trial",
    )
    parser.add_argument("--speculation", help="how the server guesses tokens ahead, as the JSON of a `launch.json`")
    return parser.parse_args(argument_list)


def _serve(arguments: argparse.Namespace) -> None:
    second = [_parse(json.loads(arguments.beside))] if arguments.beside else []
    # All arguments are read first: starting a server takes from seconds to minutes.
    launches = [
        (server_arguments, *_read(server_arguments, arguments.chat, 1 + len(second)))
        for server_arguments in (arguments, *second)
    ]
    media = _read_media(arguments, [spec for _, spec, _ in launches])
    labels = _labels([server_arguments for server_arguments, *_ in launches])
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_ready_server(spec, execution, label, server_arguments.version))
            for label, (server_arguments, spec, execution) in zip(labels, launches, strict=True)
        ]
        if arguments.chat:
            chat([_conversation(*pair, arguments, media) for pair in zip(servers, labels, strict=True)])
            return
        if API_KEY_VARIABLE not in os.environ:
            print(f"API key: {servers[0].api_key}", flush=True)
        guard(servers[0])


@contextlib.contextmanager
def _ready_server(spec: LaunchSpec, execution: ServeExecution, label: str, version: str | None) -> Iterator[Server]:
    home = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve()
    folder = home / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    log_file, runtime = folder / f"{label}.log", folder / f"{label}-{os.getpid()}"
    with (
        People(keys_folder(home)) as people,
        started_server(spec, execution, log_file, runtime, version=version, people=people) as server,
    ):
        print_timed(f"starting {server.engine.title} {spec.engine_version} for {spec.model}; its log is {log_file}")
        server.wait_until_ready(execution.ready_timeout_s, starting_lines(server.engine.title))
        server.check()
        context_tokens = server.engine.context_tokens(server.client, spec)
        compare_with_records(server.client, spec, spec.folders, context_tokens, print_timed, address=server.address)
        names = sorted(spec.folders, key=lambda name: name != spec.served_name)
        print_line(f"serving {', '.join(names)} at {server.url}/v1")
        yield server


def _labels(servers: Sequence[argparse.Namespace]) -> list[str]:
    """Return a distinct name for each server: the model's name, with its version if both servers have the same."""
    names = [one.name or one.model.resolve().name for one in servers]
    if len(set(names)) == len(names):
        return names
    return [f"{name}-{one.version or number}" for number, (name, one) in enumerate(zip(names, servers, strict=True), 1)]


def _read_media(arguments: argparse.Namespace, specs: Sequence[LaunchSpec]) -> list[dict[str, Any]]:
    """Return media as parts of a message.

    Raises RecipeError for a model that takes fewer, and DataError as `read_medium`.
    """
    given: dict[MediaKind, list[Path]] = {kind: getattr(arguments, kind) for kind in KINDS}
    for kind, files in given.items():
        for spec in specs if files else ():
            if len(files) > spec.limits.of(kind):
                raise RecipeError(f"--{kind}: {_refusal(kind, len(files), spec)}")
    limits = [spec.limits for spec in specs]
    return [read_medium(kind, file, limits) for kind, files in given.items() for file in files]


def _refusal(kind: MediaKind, number: int, spec: LaunchSpec) -> str:
    if most := spec.limits.of(kind):
        return f"found {number}, and {spec.model} takes {most} in a request (`serving.max_images`); give fewer"
    if reason := spec.limits.reasons.get(kind):
        return f"{spec.model} is not served with {NOUNS[kind]}s: {reason}"
    if spec.max_images:
        return f"{spec.model} is not served with {NOUNS[kind]}s; choose {SERVED[kind]}"
    return f"{spec.model} reads text alone; choose a model with a processor of {NOUNS[kind]}s"


def _conversation(
    server: Server, label: str, arguments: argparse.Namespace, media: Sequence[dict[str, Any]]
) -> Conversation:
    options, phrase = sampling_of(server.spec.model, arguments.temperature)
    print_timed(f"{label} answers {phrase}")
    limit = {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}
    return Conversation(server.client, label, {**options, **limit}, arguments.system, media)


def _read(arguments: argparse.Namespace, is_chat: bool, num_servers: int) -> tuple[LaunchSpec, ServeExecution]:
    model = arguments.model.resolve()
    name = arguments.name or model.name
    adapters: dict[str, Path] = {}
    for given in arguments.adapter:
        own_name, equals, folder = given.partition("=")
        if not equals or own_name in adapters:
            raise RecipeError(f"--adapter: found {given}, expected NAME=FOLDER, and every name once")
        adapters[own_name] = Path(folder).resolve()
    try:
        serving = ServingConfig.model_validate_json(arguments.serving or "{}")
        speculation = Speculation.model_validate_json(arguments.speculation) if arguments.speculation else None
        execution = ServeExecution(host=arguments.host, port=arguments.port)
    except ValidationError as error:
        raise RecipeError(f"the options for the server are wrong: {error}") from error
    base_name = arguments.base_name or f"{name}-base" if name in adapters else None
    spec = new_launch_spec(model, name, serving, adapters=adapters, base_name=base_name, speculation=speculation)
    is_trial = is_chat or arguments.serving is None
    return spec.model_copy(update={"num_tried": num_servers if is_trial else 0}), execution


if __name__ == "__main__":
    main()
