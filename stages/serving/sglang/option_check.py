"""Asks SGLang's own parser for options. stdin: JSON, option → how the command line has it. stdout: problems.

A program for the interpreter of SGLang's environment; it imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NoReturn

from sglang.srt.server_args import ServerArgs


class Refusing(argparse.ArgumentParser):
    """Raises what it would end the process with."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def main() -> None:
    """The last line that is printed are the problems, `OPTION: why`."""
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
