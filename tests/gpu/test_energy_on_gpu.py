"""The energy counter that we read from a GPU increases while time passes."""

import time

import pytest

from flows.ledger.machine import energy_j, gpus


@pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU")
def test_the_count_grows_with_time():
    before = energy_j([0])
    time.sleep(1.0)
    after = energy_j([0])
    assert before is not None and after is not None
    assert 1.0 < after - before < 2000.0  # an idle one takes some 70 W
