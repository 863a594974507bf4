"""Runs `vllm bench serve` several times in one process, since the import of vLLM takes longer than the benchmark.

A program for the interpreter of vLLM's environment; it imports nothing of ours. Reads from stdin a JSON list of
argument lists for `vllm bench serve`, and writes to the file that is its only argument a JSON list of its results. The
API key is OPENAI_API_KEY.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run_benchmarks() -> None:
    """One benchmark after the other, as the `vllm` command would run each."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    results = [main(parser.parse_args(arguments)) for arguments in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    run_benchmarks()
