"""llama.cpp's own HTTP server, which the wheel `xllamacpp` holds: `server_program.py MODEL.gguf --socket PATH …`.

A program for the interpreter of that wheel's environment; it imports nothing of ours. Serves until SIGTERM. The API key
is LLAMA_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

import xllamacpp


def main() -> None:
    """Exits with 1 when the server does not start; its log says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of each slot")
    parser.add_argument("--slots", type=int, required=True, help="requests at a time")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = xllamacpp.Server(_parameters(arguments))
    stop.wait()
    del server


def _parameters(arguments: argparse.Namespace) -> xllamacpp.CommonParams:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = arguments.model
    parameters.model_alias = {arguments.alias}
    parameters.hostnames = [arguments.socket]
    parameters.api_keys = [os.environ["LLAMA_API_KEY"]]
    parameters.n_parallel = arguments.slots
    parameters.n_ctx = arguments.context * arguments.slots  # of all slots together
    parameters.fit_params = False  # by which it would shrink the context without a word
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = False  # which shows prompts
    parameters.ui = False
    parameters.offline = True
    parameters.cache_ram_mib = 0  # 8 GiB of past prompts otherwise
    return parameters


if __name__ == "__main__":
    main()
