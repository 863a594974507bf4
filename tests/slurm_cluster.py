"""A real Slurm cluster of two nodes on this machine, for tests: munged, slurmctld and two slurmd in one folder."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.core.process_tree import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("node1", "node2")
PATIENCE_S = 300.0

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[slurmctld]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=10
MpiDefault=none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node1]} CPUs=2 RealMemory=2000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node2]} CPUs=2 RealMemory=2000
PartitionName=normal Nodes=node1,node2 Default=YES MaxTime=60 PriorityTier=1
PartitionName=urgent Nodes=node1,node2 MaxTime=60 PriorityTier=10
"""


def why_not() -> str | None:
    """Return why Slurm cannot run on this machine, as a message for a skipped test; None if it can run."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (.ci/run installs Debian's packages)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


class SlurmCluster:
    """Running Slurm cluster of two nodes; meanwhile `SLURM_CONF` in this process's environment points to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *arguments: str) -> str:
        """Run one of Slurm's commands, such as `squeue`, and return its output."""
        ended = subprocess.run(arguments, env=self.environment(), capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config), "PATH": _path()}

    def jobs(self) -> list[list[str]]:
        """Return id, state and name of every job in Slurm's queue."""
        return [line.split() for line in self.command("squeue", "--noheader", "--format=%i %T %j").splitlines()]

    def wait_for_state(self, state: str) -> str:
        """Wait until a job is in this state, such as RUNNING, and return the job's id."""
        return eventually(lambda: next((job[0] for job in self.jobs() if job[1] == state), None), f"no job is {state}")

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the Slurm daemon of a node; the jobs that it started continue."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """SIGKILL a node's Slurm daemon, steps and jobs, as if it failed; no other node may have jobs."""
        self.kill_slurmd(node)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._is_of_node(process, node):
                    os.kill(int(process.name), signal.SIGKILL)

    def _is_of_node(self, process: Path, node: str) -> bool:
        environment = (process / "environ").read_bytes().split(b"\0")
        if f"SLURM_CONF={self.config}".encode() not in environment:
            return False
        is_step = (process / "cmdline").read_bytes().startswith(b"slurmstepd:")
        return is_step or f"SLURMD_NODENAME={node}".encode() in environment

    def start(self) -> None:
        (self.folder / "state").mkdir()
        ports = dict(zip(("slurmctld", *NODES), free_ports(3), strict=True))
        self.config.write_text(CONFIG.format(folder=self.folder, host=socket.gethostname().split(".")[0], ports=ports))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        eventually((self.folder / "munge.socket").exists, "munged made no socket")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        eventually(self.is_idle, "the nodes did not come up")

    def is_idle(self) -> bool:
        states = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T"],
            env=self.environment(),
            capture_output=True,
            text=True,
        )
        return states.stdout.split() == ["idle", "idle"]

    def stop(self) -> None:
        for name in sorted(self._daemons, key=lambda name: name == "munged"):
            daemon = self._daemons[name]
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = {}

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            environment = self.environment()
            self._daemons[name] = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,  # tests that are interrupted do not come to `stop`
            )


@contextmanager
def running_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Run a Slurm cluster of two nodes until the `with` block ends; this process's environment is then restored."""
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        os.environ |= {"SLURM_CONF": str(cluster.config), "PATH": _path()}
        yield cluster
    finally:
        cluster.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def free_ports(number: int) -> list[int]:
    """Return free ports below those that the kernel picks, which no other program gets before the test's listens."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.SystemRandom().sample(range(10_000, max(first_of_kernel, 20_000)), 20 * number)
    return list(itertools.islice(filter(_is_free, candidates), number))


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def eventually(condition: Callable[[], Any], what: str) -> Any:
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, what
        time.sleep(0.1)
    return found


def _path() -> str:
    """Return PATH with the folders /usr/sbin and /sbin added, where Debian installs Slurm's daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
