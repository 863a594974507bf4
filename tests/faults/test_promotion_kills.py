"""Promotions and rollbacks killed at random moments (`make test`: 8, by night: 30) keep champion and predecessor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promotion import own_mlflow

PROGRAM = Path(__file__).with_name("promotion_kills.py")
SEED = 12


@pytest.mark.parametrize("num_kills", [8, pytest.param(30, marks=pytest.mark.nightly)])
def test_whenever_a_promotion_is_killed_there_is_one_champion_and_the_right_previous(tmp_path, fault, num_kills):
    fault.name, fault.stage = f"{num_kills} kills at random moments", "promote"
    with fault.timed("recovered"):
        done = subprocess.run(
            [sys.executable, PROGRAM, str(SEED), str(num_kills)],
            env={**os.environ, **own_mlflow(tmp_path)},
            text=True,
            capture_output=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]

    moves = [json.loads(line) for line in done.stdout.splitlines()]
    kills = [move for move in moves if "again" not in move]
    for move in moves:
        champion, previous = move["before"]
        versions = {move["after"][0]} - {champion, previous}
        if move.get("rollback"):
            assert move["after"] in ([champion, previous], [previous, champion])
        elif versions:
            assert move["after"] == [versions.pop(), champion]
        else:
            assert move["after"] == [champion, previous]
            assert "again" not in move
    assert len(kills) == num_kills
    assert {move["after"] == move["before"] for move in kills} == {True, False}
