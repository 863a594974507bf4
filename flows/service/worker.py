"""The worker: runs refreshes that Prefect says are due, and reports those whose process died to Prefect.

`lifecycle up` starts it as `python -m flows.service.worker`; it ends with SIGTERM. A refresh runs in a process of its
own, which outlives a killed worker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time

from prefect.workers.process import ProcessWorker

from flows.ledger.home import home
from flows.running.flow_runs import WORK_POOL, update_entrypoints
from flows.service.reaper import Reaper
from stages.core.errors import ServerError

REAP_INTERVAL_S = 10.0


async def work() -> None:
    """Poll until cancelled."""
    worker = ProcessWorker(name=f"lifecycle-{os.uname().nodename}", work_pool_name=WORK_POOL)
    await worker.start(with_healthcheck=True)


def reap_forever() -> None:
    """Look for dead refreshes every few seconds; a server that is away is asked again the next time."""
    reaper = Reaper()
    while True:
        try:
            reaper.reap()
        except Exception as error:
            print(f"could not report dead refreshes: {type(error).__name__}: {error}", flush=True)
        time.sleep(REAP_INTERVAL_S)


def main() -> None:
    """Run the worker until SIGTERM or SIGINT."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Prefect's folders for fetched code stay behind, empty; a killed worker's working directories, too.
    tempfile.tempdir = str(home() / "worker")
    try:
        update_entrypoints()
    except ServerError as error:
        print(f"could not look at the deployments: {error}", flush=True)
    threading.Thread(target=reap_forever, daemon=True).start()
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        shutil.rmtree(home() / "worker" / "runner_storage", ignore_errors=True)


if __name__ == "__main__":
    main()
