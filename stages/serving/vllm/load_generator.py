"""Program that runs `vllm bench serve` several times in one process: importing vLLM takes longer than the benchmark.

It runs in vLLM's environment and imports nothing of ours. stdin: JSON list of argument lists for `vllm bench serve`;
its only argument: file for the JSON list of results. The API key is OPENAI_API_KEY.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

gc.disable()  # vLLM makes a million objects that stay: to look for garbage among them takes a fifth of its import

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

gc.freeze()
gc.enable()


def run_benchmarks() -> None:
    """Run all load benchmarks of a server in this process, each as `vllm bench serve` would."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    results = [main(parser.parse_args(arguments)) for arguments in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    run_benchmarks()
