"""A failed stage process is reported with the error that its files and exit code imply."""

import json
import os

import pytest

from flows.launch.failures import GIB, MemoryKills, failure_of
from stages.core.errors import StageCrashError, error_classes

TORCHRUN_LOG = """
sft FAILED
Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_09:00:00
  host      : localhost
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 1234)
  error_file: <N/A>
"""


@pytest.mark.parametrize("name", error_classes())
def test_every_error_class_comes_back_as_itself(tmp_path, name):
    (tmp_path / "error.json").write_text(json.dumps({"error": name, "message": "what was found"}))
    error = failure_of(tmp_path, "sft", 70)
    assert type(error).__name__ == name
    assert str(error) == "what was found"


@pytest.mark.parametrize(
    ("code", "manner"),
    [
        ("-9", r"rank 3 was killed by SIGKILL \(none counted\) and left"),
        ("1", "rank 3 exited with 1 and left"),
        ("-11", "rank 3 was killed by SIGSEGV and left"),
    ],
)
def test_the_log_says_which_rank_died_first(tmp_path, code, manner):
    (tmp_path / "log.txt").write_text(TORCHRUN_LOG.format(code=1) + TORCHRUN_LOG.format(code=code))
    with pytest.raises(StageCrashError, match=manner):
        raise failure_of(tmp_path, "sft", 1, about_memory="none counted")


def test_of_a_long_log_the_last_lines_are_told(tmp_path):
    (tmp_path / "log.txt").write_text("".join(f"line {number}\n" for number in range(100_000)))
    said = str(failure_of(tmp_path, "sft", 137))
    assert str(tmp_path / "log.txt") in said
    assert said.endswith("line 99999")
    assert len(said.splitlines()) < 25


def test_a_torn_error_file_is_no_obstacle(tmp_path):
    (tmp_path / "error.json").write_text('{"error": "Da')
    assert isinstance(failure_of(tmp_path, "sft", 5), StageCrashError)


@pytest.mark.parametrize(
    ("exit_code", "died"), [(-9, True), (137, True), (139, True), (143, False), (130, False), (1, False), (255, False)]
)
def test_a_process_died_by_a_signal_that_is_no_request_to_end(tmp_path, exit_code, died):
    assert failure_of(tmp_path, "sft", exit_code).died is died


def test_a_rank_that_was_killed_on_one_node_of_several_explains_the_sigterm_of_the_others(tmp_path):
    (tmp_path / "log.txt").write_text(
        "1: Root Cause (first observed failure):\n1:   rank      : 3\n1:   exitcode  : -9\n0: step cancelled\n"
    )
    error = failure_of(tmp_path, "sft", 143)
    assert str(error).startswith("sft ended, because rank 3 was killed by SIGKILL")
    assert error.died


def test_a_rank_that_was_killed_in_an_earlier_attempt_explains_nothing(tmp_path):
    ranks_log = "Root Cause (first observed failure):\n  rank      : 1\n  exitcode  : {code}\n"
    (tmp_path / "log.txt").write_text(ranks_log.format(code=-9))
    log_begin = (tmp_path / "log.txt").stat().st_size
    with (tmp_path / "log.txt").open("a") as log:
        log.write(ranks_log.format(code=70))
    (tmp_path / "error.json").write_text(json.dumps({"error": "KeyError", "message": "'x'"}))
    error = failure_of(tmp_path, "sft", 70, log_begin)
    assert str(error).startswith("sft failed: KeyError: 'x'")
    assert not error.died


def test_a_stage_says_itself_that_its_server_died(tmp_path):
    (tmp_path / "error.json").write_text(json.dumps({"error": "ServerError", "message": "it ended", "died": True}))
    assert failure_of(tmp_path, "scores", 9).died


V2 = {"memory.events": "low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n", "memory.max": "{limit}\n"}
V1 = {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n", "memory.limit_in_bytes": "{limit}\n"}
V1_LINES = "9:name=systemd:/own\n4:memory:{path}\n1:cpu,cpuacct:/own\n0::/\n"
MACHINE = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB, all memory of this machine"


def write(folder, files, kills, limit):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.format(kills=kills, limit=limit))


@pytest.fixture
def here(tmp_path):
    """Provide a function that finds the memory cgroup of a process with the given lines in /proc/self/cgroup."""

    def find(lines):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(lines)
        (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
        return MemoryKills.here(tmp_path / "cgroup", tmp_path / "proc")

    return find


@pytest.mark.parametrize(
    ("files", "root", "lines"),
    [(V2, "cgroup", "0::/up/own\n"), (V1, "cgroup/memory", V1_LINES.format(path="/up/own"))],
    ids=["v2", "v1"],
)
def test_the_least_limit_on_the_way_to_the_root_is_named(tmp_path, here, files, root, lines):
    write(tmp_path / root / "up/own", files, kills=2, limit=GIB)
    write(tmp_path / root / "up", files, kills=5, limit=GIB // 2)
    found = here(lines)
    assert found.count() == 2
    limit_file = (
        tmp_path / root / "up" / next(name for name in files if name.startswith(("memory.max", "memory.limit")))
    )
    assert found.limit() == f"0.5 GiB limit of {limit_file}"


def test_a_container_that_is_named_by_the_path_of_its_host_has_its_group_at_the_root(tmp_path, here):
    write(tmp_path / "cgroup/memory", V1, kills=1, limit=2**63 - 4096)
    found = here(V1_LINES.format(path="/docker/0123"))
    assert (found.count(), found.limit()) == (1, MACHINE)


def test_the_root_that_a_container_sees_has_the_limit_of_the_container(tmp_path, here):
    write(tmp_path / "cgroup", V2, kills=1, limit=GIB // 4)
    assert here("0::/\n").limit() == f"0.2 GiB limit of {tmp_path / 'cgroup/memory.max'}"


def test_outside_any_group_the_machine_counts(here):
    found = here("0::/\n")
    assert (found.count(), found.limit()) == (7, MACHINE)


def test_a_group_without_a_limit_of_its_own_has_the_memory_of_the_machine(tmp_path, here):
    write(tmp_path / "cgroup/own", V2, kills=0, limit="max")
    assert here("0::/own\n").limit() == MACHINE
