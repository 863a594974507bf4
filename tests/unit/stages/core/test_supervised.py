"""The exit code of a supervised command is passed on, and no descendant process survives the command."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stages.core.process_tree import TOKEN_VARIABLE, marked_processes, remove_shared_memory, shared_memory_of
from stages.core.supervised import SupervisedProcess
from tests.faults.disks import needs_root


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*command: str, **options) -> SupervisedProcess:
        with (tmp_path / "log.txt").open("ab") as log:
            started.append(SupervisedProcess(command, environment=os.environ, output=log, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


PATIENCE_S = 120.0


def eventually(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def end_of(supervised: SupervisedProcess) -> int:
    eventually(lambda: supervised.poll() is not None)
    return supervised.poll()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 75", 75), ("kill -9 $$", 128 + 9)])
def test_it_exits_like_its_command(start, script, code):
    assert end_of(start("sh", "-c", script)) == code


def test_output_goes_where_it_is_told(start, tmp_path):
    end_of(start("sh", "-c", "echo out; echo err >&2"))
    assert (tmp_path / "log.txt").read_text() == "out\nerr\n"


def test_a_command_that_does_not_exist_is_named(start, tmp_path):
    assert end_of(start("no-such-command")) == 127
    assert "cannot start no-such-command: No such file" in (tmp_path / "log.txt").read_text()


def test_descendants_of_a_command_that_ended_are_ended(start):
    supervised = start("sh", "-c", "setsid sleep 600 & sleep 601 & exit 3")
    assert end_of(supervised) == 3
    assert marked_processes(supervised.token) == []


def test_stop_kills_what_is_deaf_to_sigterm(start, tmp_path):
    supervised = start("sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done", grace_s=0.3)
    eventually(lambda: "ready" in (tmp_path / "log.txt").read_text())
    supervised.stop()
    assert supervised.poll() is not None
    assert marked_processes(supervised.token) == []


def test_a_command_may_end_in_order_when_it_is_stopped(start, tmp_path):
    supervised = start("sh", "-c", "trap 'echo in order; exit 0' TERM; echo ready; while true; do sleep 0.05; done")
    eventually(lambda: "ready" in (tmp_path / "log.txt").read_text())
    supervised.stop()
    assert "in order" in (tmp_path / "log.txt").read_text()


def test_descendants_of_a_killed_supervisor_are_ended(start):
    supervised = start("sh", "-c", "setsid sleep 600 & sleep 601")
    eventually(lambda: {"sleep 600", "sleep 601"} <= {*map(command_of, marked_processes(supervised.token))})
    os.kill(supervised.pid, signal.SIGKILL)
    assert end_of(supervised) == -signal.SIGKILL
    assert marked_processes(supervised.token, session=supervised.pid) == []


def test_a_supervised_command_within_another_is_found_by_either_token(start, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "outer-token")
    supervised = start("sleep", "600")

    def are_found() -> bool:
        # The supervisor and the command, whose environment cannot be read while the kernel starts its program.
        found = marked_processes(supervised.token)
        return len(found) >= 2 and marked_processes("outer-token") == found

    eventually(are_found)


def test_it_costs_little(start):
    # Of this supervisor and its command alone: a look at all children counts those that earlier tests have left.
    _, status, used = os.wait4(start(sys.executable, "-S", "-c", "").pid, 0)
    assert status == 0 and used.ru_utime + used.ru_stime < 1.0


def test_shared_memory_that_a_living_process_maps_is_left_alone(tmp_path):
    from multiprocessing.shared_memory import SharedMemory

    shared = SharedMemory(create=True, size=4096)
    try:
        files = {file for file in shared_memory_of([os.getpid()]) if file.name == shared.name.lstrip("/")}
        assert len(files) == 1
        remove_shared_memory(files)
        assert next(iter(files)).exists()
    finally:
        shared.close()
        shared.unlink()


@needs_root
def test_shared_memory_is_removed_though_a_container_has_a_file_of_the_same_number(tmp_path):
    """Shared memory of a stage is removed though a container, in its own file system, has a file of this inode."""
    file = Path("/dev/shm") / f"test-{os.getpid()}"
    file.touch()
    number = file.stat().st_ino
    code = (
        "import mmap, os, sys, time\n"
        "for other in range(int(sys.argv[1]) + 2):\n"
        "    path = f'/dev/shm/{other}'\n"
        "    stream = open(path, 'w+b'); stream.truncate(1); found = os.stat(path).st_ino\n"
        "    if found == int(sys.argv[1]): break\n"
        "    stream.close(); os.unlink(path)\n"
        "mapped = mmap.mmap(stream.fileno(), 1); print(found, flush=True); time.sleep(600)"
    )
    own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", own, "sh", sys.executable, "-c", code, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as elsewhere:
        try:
            if not (found := elsewhere.stdout.readline()):
                pytest.skip("this container may not mount")
            assert int(found) == number
            remove_shared_memory({file})
            assert not file.exists()
        finally:
            elsewhere.kill()
            file.unlink(missing_ok=True)


def test_a_semaphore_is_found_by_the_process_that_made_it():
    """Clean-up finds `multiprocessing`'s semaphores, which glibc creates under a name that is gone by then."""
    code = (
        "import multiprocessing, os; from stages.core.process_tree import shared_memory_of\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(*[file.name for file in shared_memory_of([os.getpid()])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"sem\.mp-\w+\n", done.stdout)


def test_a_killed_supervisor_leaves_no_semaphore(start, tmp_path):
    """Semaphores of a stage are removed from shared memory even if the stage's supervisor is killed.

    Python's resource tracker, which unlinks semaphores, bears the stage's mark, but must not be killed, too.
    """
    code = (
        "import multiprocessing, os, sys, time; from pathlib import Path\n"
        "lock = multiprocessing.get_context('spawn').Lock(); Path(sys.argv[1]).write_text(lock._semlock.name)\n"
        "time.sleep(600)"
    )
    name_file = tmp_path / "name"
    supervised = start(sys.executable, "-c", code, str(name_file))
    eventually(lambda: name_file.is_file() and name_file.read_text())
    trackers = [pid for pid in marked_processes(supervised.token) if "resource_tracker" in command_of(pid)]
    semaphore = Path(f"/dev/shm/sem.{name_file.read_text().strip('/')}")
    assert semaphore.exists()
    for pid in trackers:
        os.kill(pid, signal.SIGSTOP)  # as slow as on a busy machine

    os.kill(supervised.pid, signal.SIGKILL)
    threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGCONT) for pid in trackers]).start()
    assert end_of(supervised) == -signal.SIGKILL

    assert not semaphore.exists()
    assert marked_processes(supervised.token) == []


def command_of(pid: int) -> str:
    """Return a process's command, its words apart by spaces; nothing of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")
    return ""
