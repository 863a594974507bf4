"""The local launcher starts a stage's processes with the environment that the recipe sets."""

import os
import sys
from pathlib import Path

import pytest

from flows.launch import local
from stages.kinds.registry import KINDS

TRAINING = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "problems"},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
}


def train(dp_shard: int = 1, **execution):
    return KINDS["train"].model_validate({**TRAINING, "layout": {"dp_shard": dp_shard}, "execution": execution})


def test_one_process_is_started_plainly():
    assert local.command(Path("/work"), train()) == [sys.executable, "-m", "stages", "/work"]


def test_several_processes_are_started_on_the_loopback():
    command = local.command(Path("/work"), train(4))
    assert command[:4] == [sys.executable, "-m", "stages.parallel.ranks", "--processes=4"]
    environment = local.environment(train(4))
    assert {environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]} == {"lo"}
    assert command[-3:] == ["-m", "stages", "/work"]


def test_a_promotion_is_started_by_the_program_that_asks_who_is_champion():
    promotion = {"kind": "promote", "name": "adder", "model": "base", "evaluations": ["scores"]}
    command = local.command(Path("/work"), KINDS["promote"].model_validate(promotion))
    assert command == [sys.executable, "-m", "flows.champion.promotion", "judge", "/work"]


@pytest.mark.parametrize(("processes", "threads"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_cores_are_shared_evenly(monkeypatch, processes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    environment = local.environment(train(processes))
    assert (environment["OMP_NUM_THREADS"], environment["RAYON_NUM_THREADS"]) == (str(threads), str(threads))


def test_the_recipe_has_the_last_word_on_the_environment():
    environment = local.environment(train(threads=3, environment={"GLOO_SOCKET_IFNAME": "eth7", "MINE": "1"}))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["MINE"]) == ("eth7", "1")
    assert environment["DO_NOT_TRACK"] == "true"
