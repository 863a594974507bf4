"""Processes of a stage find one another on an address closed to outsiders, and the first to fail ends all others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.launch.failures import failure_of
from stages.core.process_tree import descendants
from tests.listening import listening_addresses, reachable_from_elsewhere
from tests.slurm_cluster import free_ports

JOIN = """
import datetime, sys, time
from pathlib import Path
from stages.parallel.processes import gathered, joined_processes
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
with joined_processes(datetime.timedelta(minutes=47)):
    assert _get_default_store().timeout == datetime.timedelta(minutes=47)  # they wait for each other as long
    assert gathered(dist.get_rank()) == [0.0, 1.0]
    Path(sys.argv[1], f"joined-{dist.get_rank()}").touch()
    while not Path(sys.argv[1], "go-on").exists():
        time.sleep(0.02)
"""


@contextmanager
def started(*arguments: str, log: Path | None = None, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in several processes, as a stage with several ranks does, and kill them at the end."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (log or Path("/dev/null")).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stages.parallel.ranks", *flags, "--", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


PATIENCE_S = 300.0


def eventually(condition) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def joined(folder: Path, ranks: int = 2) -> bool:
    return all((folder / f"joined-{rank}").exists() for rank in range(ranks))


def test_processes_of_one_node_meet_where_nobody_else_comes_and_wait_as_long_as_they_are_to(tmp_path):
    with started("-c", JOIN, str(tmp_path), processes=2, log=tmp_path / "log") as process:
        eventually(lambda: joined(tmp_path) or process.poll() is not None)
        assert joined(tmp_path), (tmp_path / "log").read_text()
        pids = [process.pid, *descendants(process.pid)]
        assert listening_addresses(pids)  # gloo's own, or this test would see nothing
        assert not reachable_from_elsewhere(pids)
        (tmp_path / "go-on").touch()
        assert process.wait(PATIENCE_S) == 0


def test_those_of_several_nodes_meet_at_the_address_that_was_named(tmp_path):
    place = {"nodes": 2, "address": "127.0.0.1", "port": free_ports(1)[0]}
    with (
        started("-c", JOIN, str(tmp_path), processes=1, node_rank=0, **place) as first,
        started("-c", JOIN, str(tmp_path), processes=1, node_rank=1, **place) as second,
    ):
        eventually(lambda: joined(tmp_path) or None not in (first.poll(), second.poll()))
        pids = [pid for process in (first, second) for pid in (process.pid, *descendants(process.pid))]
        assert f"127.0.0.1:{place['port']}" in listening_addresses(pids)
        assert not reachable_from_elsewhere(pids)
        (tmp_path / "go-on").touch()
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0)


@pytest.mark.parametrize(
    ("last_words", "code", "manner"),
    [("sys.exit(75)", 75, "rank 1 exited with 75"), ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL")],
)
def test_the_first_that_fails_ends_the_others_and_is_named(tmp_path, last_words, code, manner):
    program = f"import os, sys, time; time.sleep(2 * {PATIENCE_S}) if os.environ['RANK'] != '1' else {last_words}"
    with started("-c", program, processes=3, log=tmp_path / "log.txt") as process:
        assert process.wait(PATIENCE_S) == code
        assert not descendants(process.pid)
    assert manner in str(failure_of(tmp_path, "sft", 1))


def test_whoever_asks_it_to_end_waits_for_its_processes(tmp_path):
    program = (
        "import signal, sys, time; from pathlib import Path\n"
        "def end(*_): time.sleep(0.3); Path(sys.argv[1], 'saved').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); Path(sys.argv[1], 'joined-0').touch(); time.sleep(1000)"
    )
    with started("-c", program, str(tmp_path), processes=1) as process:
        eventually(lambda: joined(tmp_path, 1))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
