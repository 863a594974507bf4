"""Python programs as forks of one process that has imported what they need, which takes each two seconds otherwise.

    python -m tests.forked DESCRIPTOR LISTENER   is the parent
    python -m tests.forked ADDRESS COMMAND …     does what `python COMMAND …` does, in a fork of the parent

The parent reads requests from the socket DESCRIPTOR and from connections to LISTENER: command, environment and working
directory as JSON, with descriptors for stdout, stderr and the answer, which is the exit code. A fork runs the program
as Python runs a script, and ends like one: with its threads joined, and its exit handlers called.
"""

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
from typing import NoReturn

from flows.servers.keyed import set_variables
from stages.core.process_tree import die_with_parent

ROOT = Path(__file__).parents[1]
MODULES = ("flows.cli.main", "flows.service.schedule", "flows.service.notifications", "prefect.flow_engine")
LARGEST_REQUEST = 2**17
ADDRESS = f"llm-lifecycle-forked-{os.getpid()}"
"""Address at which this process's parent listens, in the abstract namespace of Unix sockets, which needs no file."""


def run_forked(program: Path, *arguments: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a fork of the warm parent, and wait for its end."""
    command = [str(program), *map(str, arguments)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = _request(_parent(), command, environment, output.fileno(), errors.fileno())
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


def forked_command(module: str) -> list[str]:
    """Return a command that does what `python -m MODULE` does, in a fork of the warm parent."""
    _parent()
    return [sys.executable, "-m", "tests.forked", ADDRESS, "-m", module]


def _request(
    parent: socket.socket, command: list[str], environment: Mapping[str, str], output: int, errors: int
) -> int:
    """Have the parent fork a process for a command, wait for its end, and return its exit code."""
    answer, theirs = socket.socketpair()
    with answer:
        with theirs:
            request = json.dumps([command, dict(environment), str(Path.cwd())])
            socket.send_fds(parent, [request.encode()], [output, errors, theirs.fileno()])
        code = answer.recv(16)
    assert code, f"the parent of {command} died"
    return int(code)


def _ask(address: str, command: list[str]) -> NoReturn:
    """Have a command run by the parent that listens at an address, with this process's output, and end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as parent:
        parent.connect(f"\0{address}")
        code = _request(parent, command, os.environ, 1, 2)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


@cache
def _parent() -> socket.socket:
    """Return the socket of a parent, which ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Without the marks by which tests find what they have left: it serves all of them.
    inherited = {name: value for name in ("PATH", "HOME", "LANG") if (value := os.environ.get(name))}
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()
        descriptors = [theirs.fileno(), listener.fileno()]
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *map(str, descriptors)],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
    return ours


def _serve(requests: socket.socket, listener: socket.socket) -> list[str]:
    """Fork a process for each request; return in each its command, once it is set up."""
    answers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        readable, _, _ = select.select([requests, listener, *answers], [], [])
        for ended in answers.keys() & readable:
            pid, answer = answers.pop(ended)
            os.close(ended)
            with answer:
                answer.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        if listener in readable:
            connection, _ = listener.accept()
        elif requests in readable:
            connection = requests.dup()
        else:
            continue
        with connection:
            request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
        if not request:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            command, environment, folder = json.loads(request)
            for number, descriptor in enumerate(descriptors[:2], start=1):
                os.dup2(descriptor, number)
            requests.close()
            listener.close()
            os.closerange(3, max(descriptors) + 1)
            die_with_parent()
            os.chdir(folder)
            os.environ.clear()
            set_variables(environment)
            return command
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        answers[os.pidfd_open(pid)] = (pid, socket.socket(fileno=descriptors[2]))


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        _ask(sys.argv[1], sys.argv[2:])
    from flows.cli.run_command import PREFECT_SETTINGS

    os.environ |= PREFECT_SETTINGS  # which Prefect reads when it is imported
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    sys.argv = _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    if sys.argv[0] == "-m":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
