"""Launcher of a stage's processes on one node: `python -m stages.parallel.ranks OPTIONS -- ARGUMENT…`.

Each process is `python ARGUMENT…` with torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its environment.
When one fails, the others are ended, and this program exits like the one that failed first, whose rank it prints. Not
torchrun: the stores through which its processes meet listen on every interface, ask for no key and unpickle what they
are sent. The processes of one node meet in a file in memory that no one else can open (`RENDEZVOUS_FILE`), those of
several nodes at the first node's address (`processes.py`).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from stages.core.process_tree import die_with_parent

RENDEZVOUS_FILE = "LIFECYCLE_RENDEZVOUS_FILE"
POLL_INTERVAL_S = 0.05
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL; a death must be seen within 10 s, also where others wait for the dead."""


@dataclass
class Stopping:
    """Flag by which a signal, such as SIGTERM, asks this launcher to end."""

    asked: bool = False

    def ask(self, *_: object) -> None:
        self.asked = True


def main() -> int:
    """Run the stage's processes on this node until they end, and return the exit code."""
    # A flow that is killed by SIGKILL cannot end this program: the kernel does.
    die_with_parent()
    stopping = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A flag only: the loop that waits for the processes sees it within a poll interval and ends them.
        signal.signal(number, stopping.ask)
    options = _parse()
    # In memory, without a name in any folder: only processes that inherit the descriptor can open it.
    rendezvous = os.memfd_create("rendezvous") if options.nodes == 1 else None
    ranks = {
        options.node_rank * options.processes + local_rank: _start(options, local_rank, rendezvous)
        for local_rank in range(options.processes)
    }
    failed = _first_failure(ranks, stopping)
    if failed is None and not stopping.asked:
        return 0
    _end(ranks)
    if failed is None:
        return 128 + signal.SIGTERM  # as a shell reports a program that SIGTERM has ended
    code = ranks[failed].returncode
    print(f"Root Cause (first observed failure):\n  rank      : {failed}\n  exitcode  : {code}", file=sys.stderr)
    # Popen gives -9 for SIGKILL, a shell 137.
    return code if code > 0 else 128 - code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.parallel.ranks", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="number of processes on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--address", help="address of the first of several nodes, where processes meet")
    parser.add_argument("--port", help="port on the first of several nodes")
    parser.add_argument(
        "arguments", nargs="+", help="arguments of Python after `--`: the program that each process runs"
    )
    return parser.parse_args()


def _start(options: argparse.Namespace, local_rank: int, rendezvous: int | None) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(options.node_rank * options.processes + local_rank),
        "WORLD_SIZE": str(options.nodes * options.processes),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(options.processes),
    }
    if rendezvous is None:
        environment |= {"MASTER_ADDR": options.address, "MASTER_PORT": options.port}
    else:
        environment[RENDEZVOUS_FILE] = f"/proc/self/fd/{rendezvous}"  # `pass_fds` keeps the number in the child
    inherited = () if rendezvous is None else (rendezvous,)
    return subprocess.Popen([sys.executable, *options.arguments], env=environment, pass_fds=inherited)


def _first_failure(ranks: dict[int, subprocess.Popen[bytes]], stopping: Stopping) -> int | None:
    """Return the rank of the process that failed first; None when all succeeded, or this program is to end."""
    while not stopping.asked:
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = [rank for rank, code in codes.items() if code]
        if failed:  # prefer a rank killed by a signal: the others failed because of it
            # Codes of signals are negative, so that the smallest is one of them.
            return min(failed, key=lambda rank: codes[rank] or 0)
        if all(code == 0 for code in codes.values()):
            return None
        time.sleep(POLL_INTERVAL_S)
    return None


def _end(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """End the stage's processes by SIGTERM, after a grace period by SIGKILL, and wait until all have ended."""
    for process in ranks.values():
        process.terminate()
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s and any(process.poll() is None for process in ranks.values()):
        time.sleep(POLL_INTERVAL_S)
    for process in ranks.values():
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
