"""Asks LMDeploy's own parser for options. stdin: JSON, option → how the command line has it. stdout: problems.

A program for the interpreter of LMDeploy's environment; it imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from lmdeploy.cli.serve import SubCliServe


def _refuse(message: str) -> NoReturn:
    """In the place of the parser's own, which ends the process. Raises ValueError."""
    raise ValueError(message)


def main() -> None:
    """The last line that is printed are the problems, `OPTION: why`."""
    SubCliServe.add_parser_api_server()
    parser = SubCliServe.subparsers.choices["api_server"]
    parser.error, parser.allow_abbrev = _refuse, False
    problems = []
    for name, arguments in json.load(sys.stdin).items():
        try:
            _, unknown = parser.parse_known_args(["model", *arguments])
            if unknown:
                problems.append(f"{name}: unrecognized arguments: {' '.join(unknown)}")
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
