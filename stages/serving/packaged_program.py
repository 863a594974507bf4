"""Program that runs the HTTP server of SGLang or LMDeploy: `packaged_program.py ENGINE OPTION…`, with its own options.

With `ENGINE --check-options` alone, the engine's parser is asked about the options on stdin instead (JSON, option → its
arguments); the last line on stdout is a JSON list of problems. Runs in the engine's environment and imports nothing of
ours. Both take their API key as an option only, which everyone on the machine can read: here it is SGLANG_SERVER_KEY or
LMDEPLOY_SERVER_KEY.
"""

import argparse
import json
import os
import sys
from typing import NoReturn


def sglang(options: list[str]) -> None:
    """Run SGLang's server until SIGTERM, or check options with its argument parser."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    if options == ["--check-options"]:
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        check_options(parser, ["--model-path", "model"])
        return
    # Not to check options: a build for GPUs may not import these without one.
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*options, "--api-key", os.environ.pop("SGLANG_SERVER_KEY")]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def lmdeploy(options: list[str]) -> None:
    """Run LMDeploy's server until SIGTERM, or check options with its argument parser."""
    from lmdeploy.cli.serve import SubCliServe

    SubCliServe.add_parser_api_server()
    parser = SubCliServe.subparsers.choices["api_server"]
    if options == ["--check-options"]:
        check_options(parser, ["model"])
        return
    arguments = parser.parse_args(options)
    arguments.api_keys = [os.environ.pop("LMDEPLOY_SERVER_KEY")]
    SubCliServe.api_server(arguments)


def check_options(parser: argparse.ArgumentParser, model: list[str]) -> None:
    """Print a JSON list of `OPTION: reason` for the options on stdin that an engine's parser refuses."""
    # The engine makes the parser, so its methods are replaced instead of overridden.
    parser.error, parser.allow_abbrev = _refuse, False  # type: ignore[method-assign]
    problems = []
    for name, arguments in json.load(sys.stdin).items():
        try:
            parser.parse_args([*model, *arguments])
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
    print(json.dumps(problems))


def _refuse(message: str) -> NoReturn:
    """Raise ValueError with an option's problem, where argparse would end the process."""
    raise ValueError(message)


if __name__ == "__main__":
    {"sglang": sglang, "lmdeploy": lmdeploy}[sys.argv[1]](sys.argv[2:])
