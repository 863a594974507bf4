"""A helper process for untrusted input answers within its limits of time and memory, or is killed with its children."""

import os
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from stages.core import program as program_module
from stages.core.process_tree import living_processes
from stages.core.program import Program, ProgramEndedError, ProgramError
from tests.serving import wait_for

ROOT = Path(__file__).parents[4]
MODULE = "tests.unit.stages.core.asked_program"
BACKTRACKS = ["searches", "^(a+)+$", "a" * 50 + "!"]


@pytest.fixture(autouse=True)
def _planted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_TOKEN", "planted")


@pytest.fixture
def asked():
    with Program(MODULE) as program:
        yield program


def alive(pids):
    return set(pids) & set(living_processes())


def pid_of(program):
    return program.ask(["starts", False], 30)[0]


@pytest.mark.parametrize(
    "question",
    [
        1,
        1.5,
        float("inf"),
        None,
        "x",
        "\ud800 \N{ROCKET} \x00 \u2028\n",
        {"a": [1, {"b": None}]},
        ["x" * 99] * 10_000,
        -(10**400),
    ],
)
def test_questions_and_answers_of_any_size_are_json(asked, question):
    assert asked.ask(question, 60) == question


def test_a_question_takes_a_write_a_wait_and_a_read_on_each_side(asked, monkeypatch):
    """A question takes some 30 µs on a quiet machine, which are those of these calls; a busy one takes any time."""
    program, calls = psutil.Process(pid_of(asked)), Counter()

    def counted():
        wait_for(lambda: program.status() == psutil.STATUS_SLEEPING, 60)  # its last call has been counted
        return program.io_counters()

    def count(module, name):
        call = getattr(module, name)
        patch.setattr(module, name, lambda *arguments: calls.update([name]) or call(*arguments))

    before = counted()
    with monkeypatch.context() as patch:
        count(os, "write")
        count(select, "poll")
        count(os, "read")
        answers = [asked.ask({"row": number}, 60) for number in range(100)]
    assert answers == [{"row": number} for number in range(100)]
    assert calls == {"write": 100, "poll": 100, "read": 100}
    after = counted()
    assert (after.read_count - before.read_count, after.write_count - before.write_count) == (100, 100)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (["takes", 4 << 30], "MemoryError: "),
        (["descends"], "RecursionError: maximum recursion depth exceeded"),
        (["raises", "it is \ud800"], "ValueError: it is \ud800"),
        (["cannot be written"], "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_program_outlives_an_error_of_its_function(asked, question, expected):
    before = pid_of(asked)
    with pytest.raises(ProgramError) as caught:
        asked.ask(question, 60)
    assert str(caught.value).startswith(expected)
    assert pid_of(asked) == before


@pytest.mark.parametrize("question", [["spins"], BACKTRACKS])
def test_a_program_outlives_its_limit_of_cpu_time(asked, question):
    before = pid_of(asked)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            asked.ask(question, 60)
    assert pid_of(asked) == before
    assert asked.ask(["each", 0, 10, 0], 60) == [True, False, True]


@pytest.mark.parametrize("question", [["multiplies"], ["spins"], ["writes", ""], ["writes", '{"answer": '], BACKTRACKS])
def test_the_deadline_is_that_of_a_whole_line(question):
    with Program(MODULE, "endless") as program:
        process = psutil.Process(pid_of(program))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            program.ask(question, 0.3)
        assert time.monotonic() - began_s < 60
        assert not process.is_running()
        assert program.ask("again", 60) == "again"


def test_a_program_that_reads_no_question_is_not_waited_for(asked):
    process = psutil.Process(pid_of(asked))
    process.suspend()
    with pytest.raises(TimeoutError):
        asked.ask("x" * (1 << 20), 0.3)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (["ends", 7], "ended its process with exit code 7"),
        (["writes", "[]\n"], "wrote a line that is no answer"),
        (["writes", '{"answer": 1}\n{"answer": 2}\n'], "wrote a line that is no answer"),
        (["writes", "[" * 100_000 + "\n"], "wrote a line that is no answer"),
        (["writes", "x" * 2000], "answered with more than 0 MiB"),
    ],
)
def test_what_is_no_answer_ends_the_program(asked, monkeypatch, question, expected):
    if "MiB" in expected:
        monkeypatch.setattr(program_module, "MAX_ANSWER_BYTES", 1000)
    before = pid_of(asked)
    with pytest.raises(ProgramEndedError, match=expected):
        asked.ask(question, 60)
    assert not psutil.pid_exists(before)
    assert asked.ask("again", 60) == "again"


def test_a_program_that_cannot_begin_says_why():
    with Program(MODULE, "refuses") as program:
        for _ in range(2):
            with pytest.raises(ProgramError, match="ImportError: no such library"):
                program.start()


def test_a_program_has_no_keys_and_a_home_only_where_it_needs_one(asked):
    environment = asked.ask(["environment"], 60)
    assert "planted" not in str(environment)
    assert not Path(environment["HOME"]).exists()
    with Program(MODULE, needs_home=True) as program:
        environment = program.ask(["environment"], 60)
        assert Path(environment["HOME"]).is_dir()
    assert not Path(environment["HOME"]).exists()


@pytest.mark.parametrize("new_session", [False, True])
def test_what_a_program_has_started_ends_with_it(asked, new_session):
    pids = asked.ask(["starts", new_session], 60)
    with pytest.raises(ProgramEndedError):
        asked.ask(["ends", 0], 60)
    assert not alive(pids)
    pids = asked.ask(["starts", new_session], 60)
    asked.close()
    assert not alive(pids)


def test_a_forgotten_program_is_ended():
    program = Program(MODULE)
    process = psutil.Process(pid_of(program))
    del program
    assert not process.is_running()


ASKS = f"""
import os, signal, threading
from stages.core.program import Program

program = Program({MODULE!r}, "endless")
thread = threading.Thread(target=program.start)  # whose end is not that of the process
thread.start()
thread.join()
print(*program.ask(["starts", False], 60), flush=True)
program.ask(["multiplies"], 60)
"""


def test_a_program_ends_with_the_process_that_asks_whatever_it_is_doing():
    with subprocess.Popen([sys.executable, "-c", ASKS], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE) as asking:
        processes = [psutil.Process(int(pid)) for pid in asking.stdout.readline().split()]
        time.sleep(0.2)
        assert all(process.is_running() for process in processes)
        asking.kill()
    end_s = time.monotonic() + 30
    while alive(process.pid for process in processes):
        assert time.monotonic() < end_s
        time.sleep(0.01)
