"""A training step that hangs is ended by a watchdog, which logs all stacks and reports a retryable error."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from stages.core.errors import TransientError
from stages.kinds.train import watchdog
from stages.kinds.train.watchdog import Watchdog, stacks
from tests.train_stage import make_config

HANGING = """
import sys, threading
from pathlib import Path
from stages.kinds.train import watchdog

def waits_for_ever(watching):
    watching.begins("step 3")
    threading.Event().wait()

watchdog.GRACE_S, watchdog.LOOK_EVERY_S = 0.1, 0.05
with watchdog.Watchdog(Path(sys.argv[1]), timeout_s=3600) as watching:
    watching._timeout_s = 0.2  # from here on, or a busy machine might not get here in time
    waits_for_ever(watching)
"""


HANGING_AFTER_STEPS = """
import sys, threading, time
from pathlib import Path
from stages.kinds.train import watchdog

watchdog.GRACE_S, watchdog.LEAST_STEP_LIMIT_S = 0.1, 0.2
with watchdog.Watchdog(Path(sys.argv[1]), timeout_s=3600) as watching:
    monotonic, stopped_s = time.monotonic, time.monotonic()
    time.monotonic = lambda: stopped_s  # steps of no time, also on a busy machine
    for step in range(1, watchdog.KNOWN_AFTER_STEPS + 1):
        watching.begins_step(step)
        watching.has_stepped()
    time.monotonic = monotonic
    watching.begins_step(step + 1)
    threading.Event().wait()
"""


def run_hanging(work, program=HANGING):
    return subprocess.run([sys.executable, "-c", program, str(work)], capture_output=True, text=True, timeout=120)


def test_once_steps_are_known_one_that_takes_three_times_as_long_hangs(tmp_path):
    ended = run_hanging(tmp_path, HANGING_AFTER_STEPS)
    assert ended.returncode == TransientError.exit_code
    assert "step 6 has taken more than 0.2 s (3 step times, at least 0.2 s)" in ended.stderr


def test_the_limit_of_a_step_follows_the_longest_of_the_last(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watching = Watchdog(tmp_path, timeout_s=500.0)
    for step, took_s in enumerate([200.0, 10.0, 20.0, 15.0, 10.0], 1):
        watching.begins_step(step)
        assert watching._deadline_s == now_s[0] + 500.0
        now_s[0] += took_s
        watching.has_stepped()
    for step in range(6, 6 + watchdog.REMEMBERED_STEPS):
        watching.begins_step(step)
        assert watching._deadline_s == now_s[0] + 500.0 or step > 6  # three times 200 s is more than the limit
        now_s[0] += 20.0
        watching.has_stepped()
    watching.begins_step(100)
    assert watching._deadline_s == now_s[0] + 60.0
    watching.begins("the evaluation")
    assert watching._deadline_s == now_s[0] + 500.0


def test_where_steps_are_not_alike_each_has_the_whole_time(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watching = Watchdog(tmp_path, timeout_s=500.0, learns_step_times=False)
    for step in range(1, 2 * watchdog.KNOWN_AFTER_STEPS):
        watching.begins_step(step)
        assert watching._deadline_s == now_s[0] + 500.0
        now_s[0] += 10.0
        watching.has_stepped()


@pytest.mark.parametrize(
    ("fields", "are_even"),
    [({}, True), ({"data": {"dataset": "problems", "packing": False}}, False), ({"layout": {"compile": True}}, False)],
)
def test_steps_are_even_that_are_packed_and_not_compiled(fields, are_even):
    assert make_config(**fields).has_even_steps is are_even


def test_rows_of_all_lengths_are_not_compiled():
    with pytest.raises(ValueError, match=r"`layout\.compile` does not go with `data\.packing: false`"):
        make_config(data={"dataset": "problems", "packing": False}, layout={"compile": True})


def test_what_goes_on_while_stacks_are_written_was_only_slow(tmp_path, monkeypatch):
    writing, goes_on, judged = threading.Event(), threading.Event(), threading.Event()
    give_up = Watchdog._give_up

    def slowly_written():
        writing.set()
        goes_on.wait()
        return ""

    def noted(watching):
        give_up(watching)
        judged.set()

    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    monkeypatch.setattr(watchdog, "stacks", slowly_written)
    monkeypatch.setattr(Watchdog, "_give_up", noted)
    with Watchdog(tmp_path, timeout_s=0.0) as watching:
        writing.wait()
        watching._timeout_s = 3600.0
        watching.begins("step 2")
        goes_on.set()
        judged.wait()
    assert not (tmp_path / "error.json").exists()


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
    before = {*threading.enumerate()}  # of which those of earlier tests may end meanwhile
    with Watchdog(tmp_path, timeout_s=60.0) as watching:
        assert [thread.name for thread in {*threading.enumerate()} - before] == ["watchdog"]
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
