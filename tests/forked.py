"""Python programs as forks of one process that has imported what they need, which takes each two seconds otherwise.

    python -m tests.forked DESCRIPTOR

The parent reads requests from the socket DESCRIPTOR: program, arguments and environment as JSON, with descriptors for
stdout, stderr and the answer, which is the exit code. A fork runs the program as Python runs a script, and ends like
one: with its threads joined, and its exit handlers called.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from flows.servers.keyed import set_variables
from stages.core.process_tree import die_with_parent

ROOT = Path(__file__).parents[1]
MODULES = ("flows.cli.main", "flows.service.schedule", "flows.service.notifications", "prefect.flow_engine")
LARGEST_REQUEST = 2**17


def run_forked(program: Path, *arguments: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a fork of the warm parent, and wait for its end."""
    command = [str(program), *map(str, arguments)]
    answer, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, answer:
        with theirs:
            descriptors = [output.fileno(), errors.fileno(), theirs.fileno()]
            socket.send_fds(_parent(), [json.dumps([command, dict(environment)]).encode()], descriptors)
        code = answer.recv(16)
        assert code, f"the parent of {command} died"
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, int(code), *texts)


@cache
def _parent() -> socket.socket:
    """Return the socket of a parent, which ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Without the marks by which tests find what they have left: it serves all of them.
    inherited = {name: value for name in ("PATH", "HOME", "LANG") if (value := os.environ.get(name))}
    command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
    with theirs:
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request; return in each its command, once it is set up."""
    answers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        readable, _, _ = select.select([requests, *answers], [], [])
        for ended in answers.keys() & readable:
            pid, answer = answers.pop(ended)
            os.close(ended)
            with answer:
                answer.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        if requests not in readable:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
        if not request:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            command, environment = json.loads(request)
            for number, descriptor in enumerate(descriptors[:2], start=1):
                os.dup2(descriptor, number)
            requests.close()
            os.closerange(3, max(descriptors) + 1)
            die_with_parent()
            os.environ.clear()
            set_variables(environment)
            return command
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        answers[os.pidfd_open(pid)] = (pid, socket.socket(fileno=descriptors[2]))


if __name__ == "__main__":
    from flows.cli.run_command import PREFECT_SETTINGS

    os.environ |= PREFECT_SETTINGS  # which Prefect reads when it is imported
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
