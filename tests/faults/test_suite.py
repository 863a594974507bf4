"""Runs of our test suite that are interrupted or killed leave no process, and a crashed worker fails one test."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from stages.core.process_tree import marked_processes

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, time
from pathlib import Path

def test_that_leaves_a_daemon():
    daemon = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True)
    Path("started").write_text(str(daemon.pid))
    time.sleep(300)
"""


FEW = {(signal.SIGINT, 2), (signal.SIGTERM, 0), (signal.SIGKILL, 0)}
"""Pairs of signal and number of pytest-xdist workers that `make test` covers; the other pairs are nightly."""


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        pytest.param(number, workers, marks=() if (number, workers) in FEW else pytest.mark.nightly)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for workers in (0, 2)
    ],
)
def test_tests_that_are_stopped_leave_no_process(tmp_path, fault, number, workers):
    fault.name, fault.stage = f"{number.name} to tests with {workers or 'no'} workers", "all"
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.sweeper", "-c", "/dev/null", "test_it.py"]
    command += [f"--numprocesses={workers}", f"--basetemp={tmp_path / 'base'}"]
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(tmp_path)}
        tests = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    tiny.eventually((tmp_path / "started").exists, "the test did not start")
    with fault.timed("detected"):
        tests.send_signal(number)
        tests.wait(tiny.PATIENCE_S)
        tiny.eventually(lambda: not marked_processes(f"MARK={tmp_path}"), "processes are left")


def test_a_test_that_crashes_its_worker_fails_alone_and_all_others_run_once(tmp_path):
    few = "import pytest\n\n@pytest.mark.parametrize('number', range(3))\ndef test_it(number): "
    for name, body in {"a": "pass", "b": "pass", "c": "number == 1 and __import__('os')._exit(3)"}.items():
        (tmp_path / f"test_{name}.py").write_text(few + body)
    command = [sys.executable, "-m", "pytest", "-p", "tests.crashed_workers", "-c", "/dev/null"]
    command += ["--numprocesses=1", "--dist=loadfile", f"--basetemp={tmp_path / 'base'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=tiny.PATIENCE_S
    )
    assert "crashed while running 'test_c.py::test_it[1]'" in ended.stdout
    assert "1 failed, 8 passed" in ended.stdout
