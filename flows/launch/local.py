"""Local launcher: runs the processes of a stage on this machine, under a process that ends all of them together."""

import os
import re
import sys
from pathlib import Path

import stages
from flows.ledger.home import hardware_file
from flows.store.content import LOG_FILE
from stages.core.contract import StageConfig
from stages.core.supervised import SupervisedProcess

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
PROGRAMS = {"promote": "flows.champion.promotion"}
"""Programs that run before and after the stages of a kind; that of promote stages uses MLflow.

They are named as text, because they lie in a room above this one and import mlflow, which takes seconds.
"""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that keep the processes of one node on the loopback interface, out of reach of others."""
EVERYWHERE = {
    **TELEMETRY_OFF,
    "PYTHONUNBUFFERED": "1",
    # Threads that spin at a barrier take the core from those they wait for: on a busy machine, 6 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment variables of every stage process, on any launcher."""

MACHINES_OWN = re.compile(
    r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|PET|XDG|SSH|DBUS|LIFECYCLE_STAGE|KUBERNETES|RAY)_.*|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"MASTER_.*|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|_|(CUDA|ROCR|HIP|ZE)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|"
    r"(OMP|RAYON)_NUM_THREADS"
)
"""Environment variables of this machine or job, which are not passed on to the nodes of a cluster."""


def start(work: Path, config: StageConfig) -> SupervisedProcess:
    """Start the stage whose `config.json` lies in `work`; its output is appended to `log.txt` there."""
    with (work / LOG_FILE).open("ab") as log:
        return SupervisedProcess(command(work, config), environment=environment(config), output=log)


def command(work: Path, config: StageConfig) -> list[str]:
    """Return the command that runs a stage, in as many processes as its config wants."""
    program = [PROGRAMS[config.kind], "judge"] if config.kind in PROGRAMS else ["stages"]
    return on_one_node(["-m", *program, str(work)], config.processes)


def on_one_node(stage: list[str], processes: int) -> list[str]:
    """Return the command that runs a Python program in a number of processes on this machine."""
    if processes == 1:
        return [sys.executable, *stage]
    return [sys.executable, "-m", "stages.parallel.ranks", f"--processes={processes}", "--", *stage]


def environment(config: StageConfig) -> dict[str, str]:
    """Return the stage processes' environment; variables in the recipe's `execution.environment` override others."""
    python_path = ":".join(filter(None, [str(code_folder()), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        **EVERYWHERE,
        **ON_LOOPBACK,
        "PYTHONPATH": python_path,
        "LIFECYCLE_HARDWARE": str(hardware_file()),
        **threads(config.execution.threads or threads_of_each(config.processes)),
        **config.execution.environment,
    }


def user_environment() -> dict[str, str]:
    """Return this process's environment variables for a cluster's nodes, without those that describe this machine."""
    ours = {name: value for name, value in os.environ.items() if not MACHINES_OWN.fullmatch(name)}
    return {**ours, "PYTHONPATH": ":".join(filter(None, [str(code_folder()), os.environ.get("PYTHONPATH")]))}


def threads(number: int) -> dict[str, str]:
    """Return the environment variables that set the number of threads for computing and for tokenizing."""
    return dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(number))


def threads_of_each(processes: int) -> int:
    """Return the number of threads for each process, if all share this machine's usable cores equally."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def code_folder() -> Path:
    """Return the folder that holds the packages `stages` and `flows`, for the PYTHONPATH of programs to start."""
    return Path(stages.__file__).parent.parent
