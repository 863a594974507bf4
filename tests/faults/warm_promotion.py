"""Fast start of promotion processes in tests: they are forked from a process that has imported MLflow.

    python -m tests.faults.warm_promotion STEP FOLDER …   replaces `flows.champion.promotion`, under the supervisor

It hands arguments, environment and output to the process that `started` begins, and ends as the fork ends that ran
`crashing_promotion` with them.
"""

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from stages.core.process_tree import die_with_parent
from tests.parity.ranks import run_in_fork

ROOT = Path(__file__).parents[2]
ADDRESS = "WARM_PROMOTION"
"""Environment variable that names the Unix socket of the process from which promotions are forked."""
MAX_BYTES = 1 << 17
IMPORTED = (
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracking.fluent",
    "tests.faults.crashing_promotion",
)


@contextmanager
def started(address: Path, unmarked: str) -> Iterator[dict[str, str]]:
    """Start the process that forks promotions, without `unmarked`'s variable; yield the variable of its socket."""
    environment = {name: value for name, value in os.environ.items() if name != unmarked} | {"PYTHONPATH": str(ROOT)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        command = [sys.executable, "-m", "tests.faults.warm_promotion", str(listener.fileno())]
        process = subprocess.Popen(command, env=environment, pass_fds=(listener.fileno(),), preexec_fn=die_with_parent)
    with process:
        try:
            yield {ADDRESS: str(address)}
        finally:
            process.kill()


def ask() -> NoReturn:
    """Run this process's promotion in a fork of the process that has imported MLflow; exit as the fork does."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [json.dumps([sys.argv, dict(os.environ)]).encode()], [sys.stdout.fileno()])
        code = int(connection.recv(MAX_BYTES))
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def answer(listener: socket.socket) -> NoReturn:
    """Import MLflow, then serve requests for promotions: fork a process for each, and answer with its exit code."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # the forks need not look through it for garbage
    while True:
        connection, _ = listener.accept()
        with connection:
            request, (output,), *_ = socket.recv_fds(connection, MAX_BYTES, 1)
            if (pid := os.fork()) == 0:
                arguments, environment = json.loads(request)
                os.environ.clear()
                os.environ.update(environment)
                run_in_fork(sys.modules["tests.faults.crashing_promotion"].main, arguments, output)
            os.close(output)
            _, status = os.waitpid(pid, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        answer(socket.socket(fileno=int(sys.argv[1])))
    ask()
