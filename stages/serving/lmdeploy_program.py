"""Program that runs LMDeploy's HTTP server: `lmdeploy_program.py MODEL OPTION…`, as `lmdeploy serve api_server`.

With `--check-options` alone, its parser is asked about the options on stdin instead (JSON, option → its arguments); the
last line on stdout is a JSON list of problems. Runs in LMDeploy's environment and imports nothing of ours. LMDeploy
takes its API key as an option only, which everyone on the machine can read: here it is LMDEPLOY_SERVER_KEY.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from lmdeploy.cli.serve import SubCliServe


def main() -> None:
    """Run LMDeploy's server until SIGTERM; with `--check-options`, only check options with its argument parser."""
    SubCliServe.add_parser_api_server()
    parser = SubCliServe.subparsers.choices["api_server"]
    if sys.argv[1:] == ["--check-options"]:
        # LMDeploy makes the parser itself, so its methods are replaced instead of overridden.
        parser.error, parser.allow_abbrev = _refuse, False
        problems = []
        for name, options in json.load(sys.stdin).items():
            try:
                _, unknown = parser.parse_known_args(["model", *options])
                if unknown:
                    problems.append(f"{name}: unrecognized arguments: {' '.join(unknown)}")
            except (ValueError, TypeError) as error:
                problems.append(f"{name}: {error}")
        print(json.dumps(problems))
        return
    arguments = parser.parse_args(sys.argv[1:])
    arguments.api_keys = [os.environ.pop("LMDEPLOY_SERVER_KEY")]
    SubCliServe.api_server(arguments)


def _refuse(message: str) -> NoReturn:
    """Raise ValueError with an option's problem, where argparse would end the process."""
    raise ValueError(message)


if __name__ == "__main__":
    main()
