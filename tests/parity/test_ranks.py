"""Forked ranks know their rank, a failing one ends the others, and gradients of unused experts are reduced."""

import pytest

from tests.parity.ranks import started_ranks

PROGRAM = "tests.parity.rank_program"


def test_experts_that_a_process_does_not_use_are_reduced_also_without_the_method_of_torch_2_13(fsdp_ranks, tmp_path):
    fsdp_ranks.run("tests.parity.unused_program", 2, log=tmp_path / "log")


@pytest.mark.parametrize(("processes", "places"), [(1, {"hello alone"}), (2, {"hello 0", "hello 1"})])
def test_every_rank_knows_its_place(tmp_path, processes, places):
    with started_ranks() as ranks:
        ranks.run(PROGRAM, processes, "hello", log=tmp_path / "log")
    assert set((tmp_path / "log").read_text().splitlines()) == places


def test_a_rank_that_fails_takes_the_others_along_and_is_quoted(tmp_path):
    with started_ranks() as ranks:
        with pytest.raises(RuntimeError, match="rank 1 has had enough"):
            ranks.run(PROGRAM, 3, "fail", log=tmp_path / "log")
        assert ranks.processes() == []
        with pytest.raises(RuntimeError, match="No module named 'nowhere'"):
            ranks.run("nowhere", 1, log=tmp_path / "log")
        ranks.run(PROGRAM, 1, "hello", log=tmp_path / "log")
