"""The Megatron engine learns what plain Transformers learns under every layout, in fp32.

Dense models and mixtures of experts, packed or not, SFT and DPO. `make test` has every pair of choices that meets in
any case, where all dense models count as one and all mixtures as another, and every model; `make nightly` has all.
"""

import pytest

from tests.pairwise import pairwise
from tests.parity.megatron_cases import cases, make_models, values_of
from tests.parity.megatron_layouts import LIMITS, compare

PROCESSES = (1, 2, 4)
MIXTURES = ("qwen3-moe", "qwen3-moe-dense", "mixtral")
ALL = {processes: cases(processes) for processes in PROCESSES}
EVERY = [(processes, case) for processes in PROCESSES for case in ALL[processes]]


def values_by_kind(one):
    """Return a case's values by name, for `pairwise`, with the kind of its model in place of the model."""
    values = values_of(one[1])
    return {**values, "model": "mixture" if values["model"] in MIXTURES else "dense"}


CHOSEN = pairwise(EVERY, values_by_kind)
CHOSEN += {
    case.model: (processes, case)
    for processes, case in reversed(EVERY)
    if processes == 2 and case.model not in {chosen.model for _, chosen in CHOSEN}
}.values()
FEW = {processes: [case for its_processes, case in CHOSEN if its_processes == processes] for processes in PROCESSES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    make_models(folder / "models")
    return folder


@pytest.mark.parametrize("processes", PROCESSES)
def test_layouts_equal_plain_transformers(megatron_ranks, folder, processes):
    check(megatron_ranks, folder, processes, FEW[processes])


@pytest.mark.nightly
@pytest.mark.parametrize("processes", PROCESSES)
def test_every_other_layout_equals_plain_transformers(megatron_ranks, folder, processes):
    check(megatron_ranks, folder, processes, [case for case in ALL[processes] if case not in FEW[processes]])


def check(ranks, folder, processes, chosen):
    assert chosen
    too_large = {
        comparison.case.name: found
        for comparison in compare(ranks, folder, processes, chosen)
        if (found := {name: value for name, value in comparison.differences.items() if not value <= LIMITS[name]})
    }
    assert not too_large
