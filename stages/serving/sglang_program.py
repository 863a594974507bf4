"""Program that runs SGLang's HTTP server: `sglang_program.py OPTION…`, with the options of `sglang serve`.

With `--check-options` alone, its parser is asked about the options on stdin instead (JSON, option → its arguments); the
last line on stdout is a JSON list of problems. Runs in SGLang's environment and imports nothing of ours. SGLang takes
its API key as an option only, which everyone on the machine can read: here it is SGLANG_SERVER_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn

from sglang.srt.server_args import ServerArgs, prepare_server_args


class Refusing(argparse.ArgumentParser):
    """Argument parser that raises ValueError for an invalid option instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main() -> None:
    """Run SGLang's server until SIGTERM; with `--check-options`, only check options with its argument parser."""
    if sys.argv[1:] == ["--check-options"]:
        check_options()
        return
    # Not to check options: a build for GPUs may not import these without one.
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*sys.argv[1:], "--api-key", os.environ.pop("SGLANG_SERVER_KEY")]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def check_options() -> None:
    """Print a JSON list of `OPTION: reason` for the options on stdin that SGLang's parser refuses."""
    parser = Refusing(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    problems = []
    for name, arguments in json.load(sys.stdin).items():
        try:
            parser.parse_args(["--model-path", "model", *arguments])
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
