"""LMDeploy's own HTTP server: `server_program.py MODEL OPTION…`, with the options of `lmdeploy serve api_server`.

A program for the interpreter of LMDeploy's environment; it imports nothing of ours. LMDeploy takes its API key as an
option only, which everybody on the machine can read: here it is LMDEPLOY_SERVER_KEY of the environment.
"""

from __future__ import annotations

import os
import sys

from lmdeploy.cli.serve import SubCliServe


def main() -> None:
    """Serves until SIGTERM."""
    SubCliServe.add_parser_api_server()
    arguments = SubCliServe.subparsers.choices["api_server"].parse_args(sys.argv[1:])
    arguments.api_keys = [os.environ.pop("LMDEPLOY_SERVER_KEY")]
    SubCliServe.api_server(arguments)


if __name__ == "__main__":
    main()
