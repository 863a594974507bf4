"""Batch step of a Slurm job: starts the stage's processes on every node, and records how they ended.

    python -m flows.launch.slurm_batch LAUNCH_FOLDER

It runs on the first node, with an environment that holds nothing of the user's. SIGTERM comes before the time limit, at
a preemption or a cancellation: the stage is ended in order, so that its last checkpoint is complete.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from flows.launch.cluster_job import JobEnd, JobFolder, JobOrder
from flows.launch.failures import leave_error
from flows.launch.network import FIRST_MACHINE, address_of, this_machine
from stages.core.errors import ResourceError
from stages.core.launchers.slurm import SlurmOptions

POLL_INTERVAL_S = 0.2
GRACE_S = 25.0
"""Seconds that the stage has to end after SIGTERM; less than Slurm's default KillWait."""


def main() -> int:
    """Run the stage in a Slurm job until the stage ends or Slurm asks the job to end; return the exit code."""
    folder = JobFolder(Path(sys.argv[1]))
    order = folder.order()
    assert order, f"no order in {folder.path}"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job_id = os.environ["SLURM_JOB_ID"]
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    folder.claim(f"{job_id}, restart {restart}")
    again = f", restart {restart}" if restart != "0" else ""
    folder.report("milestone", f"Slurm job {job_id} runs on {os.environ['SLURM_JOB_NODELIST']}{again}")
    try:
        meeting = rendezvous_environment(order)
    except ResourceError as error:
        folder.write_end(JobEnd(job_id=job_id, exit_code=leave_error(order.work, error)))
        return error.exit_code
    step = subprocess.Popen(step_command(order, folder), env={**os.environ, **meeting})
    while (code := step.poll()) is None and not stop.is_set():
        stop.wait(POLL_INTERVAL_S)
    if code is None:
        _end(step)
    # No exit code means that the stage was interrupted: the agent submits another job.
    folder.write_end(JobEnd(job_id=job_id, exit_code=code))
    return 128 + signal.SIGTERM if code is None else code


def step_command(order: JobOrder, folder: JobFolder) -> list[str]:
    """Return the `srun` command that starts one task on each node. The first task that fails ends the others."""
    srun = ["srun", "--export=ALL", f"--nodes={order.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    # srun does not take the number of cores over from sbatch.
    srun += [f"--cpus-per-task={order.block(SlurmOptions).cpus_per_node or order.cores_per_node}"]
    labels = ["--label"] if order.nodes > 1 else []
    return [*srun, *labels, sys.executable, "-m", "flows.launch.node_task", str(folder.path)]


def rendezvous_environment(order: JobOrder) -> dict[str, str]:
    """Return the rendezvous address and port, a free one of the job's first node, as environment variables.

    The address is that of the interface which the recipe names, else empty: then each task uses Slurm's. Raises
    ResourceError when the interface is absent.
    """
    address = address_of(order.network_interface) if order.network_interface else ""
    with socket.socket() as listener:
        # Free at this moment; the stage listens there a little later.
        listener.bind(("", 0))
        return {"MASTER_ADDR": address, "MASTER_PORT": str(listener.getsockname()[1]), FIRST_MACHINE: this_machine()}


def _end(step: subprocess.Popen[bytes]) -> None:
    step.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        step.wait(GRACE_S)
        return
    step.kill()
    step.wait()


if __name__ == "__main__":
    sys.exit(main())
