"""Recorded process ids tell if a process still runs: after reboots, in containers, in copied lifecycle homes."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from flows.ledger.home import HomeIdentity, home_identity
from flows.ledger.process_identity import SILENCE_S, Heartbeat, ProcessIdentity, is_silent

ELSEWHERE = {"host": "other", "boot": "00000000-0000-0000-0000-000000000000"}


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    process.communicate()
    return identity


def test_a_process_of_here_is_alive_or_dead():
    assert ProcessIdentity.own().standing() == "alive"
    assert ended_process().standing() == "dead"


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"pid_namespace": 1}])
def test_a_process_of_another_boot_or_container_is_neither_alive_nor_dead(changed):
    for process in (ProcessIdentity.own(), ended_process()):
        assert process.model_copy(update=changed).standing() == "foreign"


def test_a_record_of_an_earlier_version_is_of_here():
    own = ProcessIdentity.own()
    assert ProcessIdentity(pid=own.pid, started_ticks=own.started_ticks).standing() == "alive"
    assert ProcessIdentity(pid=own.pid, started_ticks=own.started_ticks + 1).standing() == "dead"


def in_container(namespace, code):
    """Run Python code in a new PID namespace, as in a container, and return its standard output."""
    command = [*namespace, sys.executable, "-c", code]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()


def test_a_process_is_not_taken_for_one_of_the_same_number_in_a_container():
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make PID namespaces")
    asked = "from flows.ledger.process_identity import ProcessIdentity as P; "
    own = ProcessIdentity.own()
    code = f"{asked}print(P.model_validate_json('''{own.model_dump_json()}''').standing())"
    assert in_container(namespace, code) == "foreign"
    inside = ProcessIdentity.model_validate_json(in_container(namespace, f"{asked}print(P.own().model_dump_json())"))
    assert inside.boot == own.boot and inside.standing() == "foreign"


@pytest.mark.parametrize(("age_s", "silent"), [(SILENCE_S - 60, False), (SILENCE_S + 60, True)])
def test_who_is_elsewhere_is_silent_after_ten_minutes(tmp_path, age_s, silent):
    process = ProcessIdentity.own().model_copy(update=ELSEWHERE)
    (tmp_path / "heartbeat").touch()
    assert not is_silent(process, tmp_path / "heartbeat", tmp_path / "ledger.jsonl")
    then_s = time.time() - age_s
    os.utime(tmp_path / "heartbeat", (then_s, then_s))
    assert is_silent(process, tmp_path / "heartbeat", tmp_path / "ledger.jsonl") is silent


def test_the_latest_sign_of_life_counts(tmp_path):
    process = ProcessIdentity.own().model_copy(update=ELSEWHERE)
    (tmp_path / "heartbeat").touch()
    os.utime(tmp_path / "heartbeat", (0, 0))
    (tmp_path / "ledger.jsonl").touch()
    assert not is_silent(process, tmp_path / "heartbeat", tmp_path / "ledger.jsonl")


def test_an_earlier_boot_of_this_host_has_ended_when_nothing_was_heard_since(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "clock_gettime", lambda _: 40.0)
    before = ProcessIdentity.own().model_copy(update={"boot": ELSEWHERE["boot"]})
    (tmp_path / "heartbeat").touch()
    for age_s, silent in ((30, False), (50, True)):
        then_s = time.time() - age_s
        os.utime(tmp_path / "heartbeat", (then_s, then_s))
        assert is_silent(before, tmp_path / "heartbeat") is silent
        assert not is_silent(before.model_copy(update={"host": "other"}), tmp_path / "heartbeat")


def test_a_heartbeat_is_touched_while_it_goes_and_is_removed_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.ledger.process_identity.INTERVAL_S", 0.01)
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.start()
    for _ in range(2):
        os.utime(tmp_path / "heartbeat", (0, 0))
        while (tmp_path / "heartbeat").stat().st_mtime == 0:
            time.sleep(0.01)
    heartbeat.stop()
    heartbeat.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_moved_stays_the_same_and_a_copy_is_another(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    identity = home_identity()
    assert identity.is_here()
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "copy"))
    assert not identity.is_here()
    (tmp_path / "home").rename(tmp_path / "moved")
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "moved"))
    assert identity.is_here()


def test_devices_count_within_a_boot_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    here = home_identity()
    assert not here.model_copy(update={"device": here.device + 1}).is_here()
    renumbered = {"device": here.device + 1, "boot": ELSEWHERE["boot"]}
    assert here.model_copy(update=renumbered).is_here()
    assert not HomeIdentity(boot=ELSEWHERE["boot"], device=here.device, inode=here.inode + 1).is_here()
