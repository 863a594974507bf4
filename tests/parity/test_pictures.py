"""Two processes, one of them without pictures, train a model that sees as one process does."""

import json
from pathlib import Path

import pytest

from tests.parity.ranks import Ranks
from tests.zoo.pictures import save_family

NIGHTLY = (
    "qwen3_vl",
    "gemma3",
    "qwen2_5_vl",
    "gemma4",
    "llava_onevision",
    "internvl",
    "mistral3",
    "llama4",
    "glm4v",
    "idefics3",
)
LARGEST = 1e-6
"""Largest relative difference of losses and of gradients' norms between one process and two."""


def check(family: str, cases: str, tmp_path: Path, fsdp_ranks: Ranks, processes: int = 2) -> None:
    """Train a family on one process, and on several."""
    folder = save_family(family, tmp_path / family)
    results = []
    for number in (1, processes):
        output = tmp_path / f"{number}.json"
        arguments = (output, cases, folder)
        fsdp_ranks.run("tests.parity.pictures_program", number, *arguments, log=tmp_path / f"{number}.log")
        results.append(json.loads(output.read_text()))
    alone, together = results
    assert alone.keys() == together.keys()
    for case, steps in alone.items():
        # GRPO's loss is what is left of advantages of ±0.5, which cancel: rounding is relative to these.
        least = 0.5 * LARGEST if case.endswith("GRPO") else None
        assert together[case] == [pytest.approx(step, rel=LARGEST, abs=least) for step in steps], case
        assert steps[-1][0] < steps[0][0], case


def test_a_process_without_pictures_neither_hangs_nor_changes_the_loss(tmp_path: Path, fsdp_ranks: Ranks) -> None:
    check("qwen3_vl", "few", tmp_path, fsdp_ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("family", NIGHTLY)
def test_every_kind_of_tower_does_so(family: str, tmp_path: Path, fsdp_ranks: Ranks) -> None:
    check(family, "all", tmp_path, fsdp_ranks)


@pytest.mark.nightly
def test_processes_with_other_kinds_of_media_neither_hang_nor_change_the_loss(
    tmp_path: Path, fsdp_ranks: Ranks
) -> None:
    check("qwen3_vl", "kinds", tmp_path, fsdp_ranks)


@pytest.mark.nightly
def test_a_process_without_sounds_neither_hangs_nor_changes_the_loss(tmp_path: Path, fsdp_ranks: Ranks) -> None:
    check("qwen2_audio", "sounds", tmp_path, fsdp_ranks)


@pytest.mark.nightly
def test_spread_experts_beside_a_tower_learn_the_same(tmp_path: Path, fsdp_ranks: Ranks) -> None:
    check("qwen3_vl_moe", "experts", tmp_path, fsdp_ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("cases", ["split", "adapters"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "internvl"])
def test_split_matrices_beside_whole_towers_learn_the_same(
    family: str, processes: int, cases: str, tmp_path: Path, fsdp_ranks: Ranks
) -> None:
    check(family, cases, tmp_path, fsdp_ranks, processes)


@pytest.mark.nightly
def test_a_model_that_sees_without_a_plan_is_refused(tmp_path: Path, fsdp_ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="has no plan of tensor parallelism in Transformers; set `tp: 1`"):
        check("qwen3_vl", "split", tmp_path, fsdp_ranks)
