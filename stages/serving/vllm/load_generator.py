"""Program that runs `vllm bench serve` several times in one process: importing vLLM takes longer than the benchmark.

It runs in vLLM's environment and imports nothing of ours. stdin: JSON list of argument lists for `vllm bench serve`;
its arguments: address of the server, file for the JSON list of results. The API key is OPENAI_API_KEY.
"""

import gc
import json
import os
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

gc.disable()  # vLLM makes a million objects that stay: to look for garbage among them takes a fifth of its import

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

gc.freeze()
gc.enable()

COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
TIMEOUT_S = 60.0


def run_benchmarks() -> None:
    """Run all load benchmarks of a server in this process, each as `vllm bench serve` would."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    results = [_measured(parser.parse_args(arguments)) for arguments in json.load(sys.stdin)]
    Path(sys.argv[2]).write_text(json.dumps(results))


def _measured(arguments: Any) -> dict[str, Any]:
    """Run a benchmark; its result has the share of tokens guessed ahead that were accepted, None if none were guessed.

    vLLM's own benchmark asks for these counters without the API key, and so gets none.
    """
    before = _guessed_and_accepted()
    result: dict[str, Any] = main(arguments)
    guessed, accepted = (now - then for now, then in zip(_guessed_and_accepted(), before, strict=True))
    return {**result, "accepted_fraction": accepted / guessed if guessed else None}


def _guessed_and_accepted() -> list[float]:
    """Return the server's counters of tokens guessed ahead, and of those accepted; 0 for one that does not guess."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with closing(HTTPConnection(sys.argv[1].removeprefix("http://"), timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/metrics", headers=headers)
        lines = connection.getresponse().read().decode().splitlines()
    return [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")) for name in COUNTERS]


if __name__ == "__main__":
    run_benchmarks()
