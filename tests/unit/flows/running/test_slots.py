"""Stages never use more devices than exist, none waits forever, and devices of dead processes become free."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.running.slots import Slots

ROOT = Path(__file__).parents[4]


class BusyError(Exception):
    """Error raised by a test as soon as a stage would have to wait for a free device."""


def busy():
    raise BusyError


@pytest.fixture
def slots(tmp_path):
    return Slots(tmp_path / "slots", 2)


def test_what_is_held_is_not_given_again(slots):
    held = slots.acquire(2, busy)
    assert held.numbers == [0, 1]
    with pytest.raises(BusyError):
        slots.acquire(1, busy)
    held.release()
    assert slots.acquire(1, busy).numbers == [0]


def test_a_failed_request_keeps_nothing(slots):
    one = slots.acquire(1, busy)
    with pytest.raises(BusyError):
        slots.acquire(2, busy)
    assert slots.acquire(1, busy).numbers == [1]
    one.release()


def test_no_slots_are_always_to_be_had(slots):
    slots.acquire(2, busy)
    assert slots.acquire(0, busy).numbers == []


def test_a_large_request_is_not_overtaken_by_small_ones(slots):
    one = slots.acquire(1, busy)
    order = []

    def take(count, waits):
        held = slots.acquire(count, waits.set)
        order.append(count)
        held.release()

    waiting = {count: threading.Event() for count in (2, 1)}
    threads = [threading.Thread(target=take, args=one) for one in waiting.items()]
    for thread, waits in zip(threads, waiting.values(), strict=True):
        thread.start()
        waits.wait()
    one.release()
    for thread in threads:
        thread.join()
    assert order == [2, 1]


HOLDER = """
import sys, time
from pathlib import Path
from flows.running.slots import Slots
held = Slots(Path(sys.argv[1]), 2).acquire(2, lambda: None)
print("held", flush=True)
time.sleep(60)
"""


def test_the_slots_of_a_killed_process_are_free_at_once(slots):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, slots.folder], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout.readline() == b"held\n"
    holder.kill()
    holder.communicate()
    assert slots.acquire(2, busy).numbers == [0, 1]


def test_free_slots_are_counted_without_being_kept(tmp_path):
    slots = Slots(tmp_path / "slots", 3)
    assert slots.num_free() == 3
    held = slots.acquire(2, lambda: None)
    assert (slots.num_free(), slots.num_free()) == (1, 1)
    held.release()
    assert slots.num_free() == 3
