"""A process whose step does not end says where it was and ends as worth a retry; one that gets on is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

from stages.core.errors import TransientError
from stages.train.watchdog import Watchdog, stacks

HANGING = """
import sys, threading
from pathlib import Path
from stages.train import watchdog

def waits_for_ever():
    threading.Event().wait()

watchdog.GRACE_S = 0.1
with watchdog.Watchdog(Path(sys.argv[1]), timeout_s=0.2) as watching:
    watching.begins("step 3")
    waits_for_ever()
"""


def run_hanging(work):
    return subprocess.run([sys.executable, "-c", HANGING, str(work)], capture_output=True, text=True, timeout=120)


def test_a_step_without_end_ends_the_process_with_its_stacks(tmp_path):
    ended = run_hanging(tmp_path)
    assert ended.returncode == TransientError.exit_code
    assert "rank 0: step 3 has taken more than 0.2 s (execution.hang_timeout_s); its threads:" in ended.stderr
    assert "in waits_for_ever" in ended.stderr
    failure = json.loads((tmp_path / "error.json").read_text())
    assert failure["error"] == "TransientError"
    assert "step 3 has taken more than 0.2 s" in failure["message"]


def test_the_word_of_a_rank_that_failed_before_stands(tmp_path):
    (tmp_path / "error.json").write_text("of another rank")
    assert run_hanging(tmp_path).returncode == TransientError.exit_code
    assert (tmp_path / "error.json").read_text() == "of another rank"


def test_steps_that_end_in_time_are_left_alone_and_so_is_what_follows(tmp_path):
    begun = threading.active_count()
    with Watchdog(tmp_path, timeout_s=60.0) as watching:
        assert threading.active_count() == begun + 1
        for step in range(3):
            watching.begins(f"step {step}")
    watchdogs = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    for thread in watchdogs:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not (tmp_path / "error.json").exists()


def test_the_stacks_are_those_of_all_threads():
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait, name="another thread")
    other.start()
    try:
        text = stacks()
    finally:
        waiting.set()
        other.join()
    assert "thread another thread:" in text
    assert "test_the_stacks_are_those_of_all_threads" in text
