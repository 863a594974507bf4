"""Program that checks server options with the argument parser of `vllm serve`.

Runs in vLLM's environment. stdin: JSON, option → its arguments. stdout: last a JSON list of problems.
"""

import difflib
import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


class RaisingParser(FlexibleArgumentParser):
    """Argument parser that raises ValueError for an invalid option instead of ending the process."""

    def error(self, message: str) -> None:
        raise ValueError(message)


def main() -> None:
    """Print a JSON list of `OPTION: reason` for the options on stdin that vLLM's parser refuses."""
    parser = make_arg_parser(RaisingParser())
    names = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    problems = []
    for name, arguments in json.load(sys.stdin).items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=2)
            meant = f"did you mean {' or '.join(close)}?" if close else "see `vllm serve --help=all`"
            problems.append(f"{name}: vLLM has no such option; {meant}")
            continue
        try:
            parser.parse_args(["model", *arguments])
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
