"""SGLang's own HTTP server: `server_program.py OPTION…`, with the options of `sglang serve`.

A program for the interpreter of SGLang's environment; it imports nothing of ours. SGLang takes its API key as an option
only, which everybody on the machine can read: here it is SGLANG_SERVER_KEY of the environment.
"""

from __future__ import annotations

import os
import sys

from sglang.launch_server import run_server
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree


def main() -> None:
    """Serves until SIGTERM; its processes end with it."""
    try:
        run_server(prepare_server_args([*sys.argv[1:], "--api-key", os.environ.pop("SGLANG_SERVER_KEY")]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
