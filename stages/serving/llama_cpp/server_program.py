"""Program that runs llama.cpp's HTTP server from the wheel `xllamacpp`: `server_program.py MODEL.gguf --socket PATH …`.

It runs in that wheel's environment and imports nothing of ours. It serves until SIGTERM. The API key is LLAMA_API_KEY.
"""

import argparse
import os
import signal
import threading

import xllamacpp


def main() -> None:
    """Run llama.cpp's server until SIGTERM. Exits with 1 if it does not start; its log has the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument(
        "--context", type=int, required=True, help="context length of each concurrent request, in tokens"
    )
    parser.add_argument("--slots", type=int, required=True, help="number of concurrent requests")
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
    parameters.fit_params = False  # else it may shrink the context silently
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = False  # that route shows prompts
    parameters.ui = False
    parameters.offline = True
    parameters.cache_ram_mib = 0  # 8 GiB of past prompts otherwise
    return parameters


if __name__ == "__main__":
    main()
