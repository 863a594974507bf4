"""Program that runs the proxy in a Kubernetes pod: `python -m stages.serving.proxy_program SOCKET PORT [IMAGES]`.

It answers on every address of the pod, until SIGTERM; the engine listens on SOCKET, and requests wait while kubelet
restarts it. IMAGES: largest number of pictures in a request, default 0. The API key is VLLM_API_KEY. A lock beside the
socket tells others until when the engine is needed.
"""

import fcntl
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from stages.serving.backend import Backend, EngineAddress
from stages.serving.pictures import Limits
from stages.serving.proxy import API_KEY_VARIABLE, Proxy, listening
from stages.serving.waiting import RequestQueue

LOCK_NAME = "proxy.lock"
LAST_ANSWERS_TIMEOUT_S = 600.0
"""Seconds that running answers get after SIGTERM, since long ones take minutes; without any, the proxy ends at once."""


def main() -> None:
    """Run the proxy until SIGTERM, then complete the running answers."""
    engine = Backend(EngineAddress(Path(sys.argv[1])), limits=Limits(int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    public = socket.create_server(("0.0.0.0", int(sys.argv[2])))  # noqa: S104 (a pod's; asks for the key)
    proxy = Proxy(engine, os.environ[API_KEY_VARIABLE], waiting=RequestQueue())
    with Path(sys.argv[1]).with_name(LOCK_NAME).open("w") as lock:
        # Before the first answer: an engine that is asked to end meanwhile must find it held.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with listening(proxy, public, LAST_ANSWERS_TIMEOUT_S):
            stop.wait()


if __name__ == "__main__":
    main()
