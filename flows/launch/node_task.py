"""Program that a cluster job starts on each node: it runs and supervises that node's processes of the stage.

    python -m flows.launch.node_task LAUNCH_FOLDER [OWNER]

It exits with the stage's exit code. SIGTERM, missing heartbeats of the agent, or another start of the same job end all
processes of the stage. OWNER: this start's name, where a job that was cancelled may start late all the same.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from flows.launch import local
from flows.launch.cluster import CLUSTERS
from flows.launch.cluster_job import HeartbeatMonitor, JobEnd, JobFolder, JobOrder
from flows.launch.failures import INTERRUPTED, leave_error
from flows.launch.network import Rendezvous, check_reachable, is_loopback
from flows.store.content import LOG_FILE
from stages.core.errors import ResourceError
from stages.core.supervised import SupervisedProcess

POLL_INTERVAL_S = 0.2


def main() -> int:
    """Run this node's processes of the stage; return the stage's exit code."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory dump: memory holds keys
    folder = JobFolder(Path(sys.argv[1]))
    order, owner = folder.order(), folder.owner()
    if sys.argv[2:] and (order is None or sys.argv[2] != owner):
        print(f"{sys.argv[2]} was cancelled before it started", flush=True)
        return INTERRUPTED
    assert order, f"no order in {folder.path}"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    cluster = CLUSTERS[order.launcher]
    place = cluster.place(os.environ) if order.nodes > 1 else None
    environment = complete({**os.environ, **folder.environment()}, order, place)
    try:
        if place:
            check_reachable(place, environment)
    except ResourceError as error:
        return leave_error(order.work, error)
    with _output(order, cluster.collects_output) as output:
        process = SupervisedProcess(command(order, place), environment=environment, output=output)
    code = _wait(process, folder, order, owner, stop)
    if code is None:
        return INTERRUPTED
    if not cluster.records_end and (place is None or place.rank == 0):
        folder.write_end(JobEnd(job_id=owner or order.job, exit_code=code))
    return code


def _wait(
    process: SupervisedProcess, folder: JobFolder, order: JobOrder, owner: str | None, stop: threading.Event
) -> int | None:
    """Wait for the stage's processes and return their exit code; None when they had to be stopped."""
    # After a node was lost, the job may have been started elsewhere: two starts must not write to one work folder.
    pulse = HeartbeatMonitor(folder, order.heartbeat_patience_s)
    while (code := process.poll()) is None:
        if pulse.is_lost():
            print(f"no heartbeat from the agent for {order.heartbeat_patience_s:g} s: the job ends", flush=True)
            stop.set()
        if folder.owner() != owner:
            print("the job was started on other nodes: it ends here", flush=True)
            stop.set()
        if stop.wait(POLL_INTERVAL_S):
            process.stop()
            return None
    return code


def _output(order: JobOrder, is_collected: bool) -> BinaryIO:
    """Return the stream for the stage's output: its log file, or stdout if the cluster itself writes that file."""
    if is_collected:
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    return (order.work / LOG_FILE).open("ab")


def command(order: JobOrder, place: Rendezvous | None) -> list[str]:
    """Return the command that starts this node's processes of the stage, which meet at the first node's address."""
    if place is None:
        return local.on_one_node(order.stage_command, order.processes)
    return [
        *(sys.executable, "-m", "stages.parallel.ranks", f"--processes={order.processes}", f"--nodes={order.nodes}"),
        *(f"--node-rank={place.rank}", f"--address={place.address}", f"--port={place.port}", "--"),
        *order.stage_command,
    ]


def complete(environment: Mapping[str, str], order: JobOrder, place: Rendezvous | None) -> dict[str, str]:
    """Return the environment of the stage's processes, with this node's number of threads and network interface."""
    known = local.threads(order.threads or local.threads_of_each(order.processes))
    if place is None or is_loopback(place.address):
        known |= local.ON_LOOPBACK
    elif order.network_interface:
        known |= dict.fromkeys(local.ON_LOOPBACK, order.network_interface)
    # Variables that are set already, such as the recipe's, win.
    return {**known, **environment}


if __name__ == "__main__":
    sys.exit(main())
