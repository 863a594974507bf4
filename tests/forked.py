"""Python programs as forks of one process that has imported what they need, which takes each two seconds otherwise.

    python -m tests.forked DESCRIPTOR LISTENER   is the parent
    python forked.py ADDRESS COMMAND …           does what `python COMMAND …` does, in a fork of the parent

The parent reads requests from the socket DESCRIPTOR and from connections to LISTENER: command, environment and working
directory as JSON, with descriptors for stdin, stdout, stderr and the answer, which is the exit code. A fork runs the
program as Python runs a script, and ends like one: with its threads joined, and its exit handlers called. It is killed
when the process that asked for it has died. Programs of the pipeline that it starts and that use MLflow are forks, too.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
FORKED = ("flows.tracking.shipper", "flows.champion.promotion")
"""Modules that processes of forks run as forks, as well."""
MODULES = (
    "flows.cli.main",
    "flows.service.schedule",
    "flows.service.notifications",
    "prefect.flow_engine",
    "mlflow.tracking.client",
)
LARGEST_REQUEST = 2**17
ADDRESS = f"llm-lifecycle-forked-{os.getpid()}"
"""Address at which this process's parent listens, in the abstract namespace of Unix sockets, which needs no file."""


def run_forked(program: Path, *arguments: object, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a fork of the warm parent, and wait for its end."""
    command = [str(program), *map(str, arguments)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, Path(os.devnull).open() as nothing:
        code = _request(_parent(), command, environment, [file.fileno() for file in (nothing, output, errors)])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


def forked_command(*command: str) -> list[str]:
    """Return a command that does what `python COMMAND …` does, in a fork of the warm parent."""
    _parent()
    return _asking(ADDRESS, command)


def _asking(address: str, command: Sequence[str]) -> list[str]:
    """Return a command that has the parent at an address run another; it needs and imports no packages."""
    return [sys.executable, "-I", "-S", __file__, address, *command]


def _fork_programs(address: str) -> None:
    """Have this process start the programs in `FORKED` as forks of the parent at an address."""

    class ForkedPrograms(subprocess.Popen):
        def __init__(self, args: Any, *others: Any, **options: Any) -> None:
            for name in FORKED:
                if isinstance(args, list) and name in args:
                    place = args.index(name) - 2
                    args = [*args[:place], *_asking(address, args[place + 1 :])]
            super().__init__(args, *others, **options)

    subprocess.Popen = ForkedPrograms


def _request(parent: socket.socket, command: list[str], environment: Mapping[str, str], standard: list[int]) -> int:
    """Have the parent fork a process for a command, wait for its end, and return its exit code.

    standard: the descriptors of its stdin, stdout and stderr.
    """
    answer, theirs = socket.socketpair()
    with answer:
        with theirs:
            request = json.dumps([command, dict(environment), str(Path.cwd())])
            socket.send_fds(parent, [request.encode()], [*standard, theirs.fileno()])
        code = answer.recv(16)
    assert code, f"the parent of {command} died"
    return int(code)


def _ask(address: str, command: list[str]) -> NoReturn:
    """Have a command run by the parent that listens at an address, with this process's output, and end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as parent:
        parent.connect(f"\0{address}")
        code = _request(parent, command, os.environ, [0, 1, 2])
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
    from flows.servers.keyed import set_variables
    from stages.core.process_tree import die_with_parent

    address = listener.getsockname()[1:].decode()
    answers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        waiting = {answer: ended for ended, (_, answer) in answers.items()}
        readable, _, _ = select.select([requests, listener, *answers, *waiting], [], [])
        for answer in waiting.keys() & readable:  # at its end, which is that of the process that asked
            signal.pidfd_send_signal(waiting[answer], signal.SIGKILL)
        for ended in answers.keys() & readable:
            pid, answer = answers.pop(ended)
            os.close(ended)
            with answer:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    answer.send(str(code).encode())
        if listener in readable:
            connection, _ = listener.accept()
        elif requests in readable:
            connection = requests.dup()
        else:
            continue
        with connection:
            request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 4)
        if not request:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            command, environment, folder = json.loads(request)
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
            requests.close()
            listener.close()
            os.closerange(3, max(descriptors) + 1)
            die_with_parent()
            os.chdir(folder)
            os.environ.clear()
            set_variables(environment)
            _fork_programs(address)
            return command
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        answers[os.pidfd_open(pid)] = (pid, socket.socket(fileno=descriptors[3]))


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        _ask(sys.argv[1], sys.argv[2:])
    from flows.cli.run_command import PREFECT_SETTINGS
    from flows.tracking.shipper import CLIENT_ENVIRONMENT

    os.environ |= PREFECT_SETTINGS | CLIENT_ENVIRONMENT  # which Prefect and MLflow read when they are imported
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
