"""The Megatron engine learns what plain Transformers learns, under every layout, in fp32: dense and mixtures, packed or
not, SFT and DPO."""

from __future__ import annotations

import pytest

from tests.parity.megatron_cases import make_models
from tests.parity.megatron_layouts import LIMITS, compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    make_models(folder / "models")
    return folder


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_layout_equals_plain_transformers(megatron_ranks, folder, processes):
    too_large = {
        comparison.case.name: found
        for comparison in compare(megatron_ranks, folder, processes)
        if (found := {name: value for name, value in comparison.differences.items() if not value <= LIMITS[name]})
    }
    assert not too_large
