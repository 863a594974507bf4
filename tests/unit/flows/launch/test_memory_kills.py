"""Kills by the kernel are counted in the cgroup that this process is in, be that of v1, of v2, or of a container."""

import os

import pytest

from flows.launch.memory_kills import GIB, MemoryKills

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
    """What is found for a process with these lines in /proc/self/cgroup."""

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
