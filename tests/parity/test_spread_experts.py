"""Both engines learn the same from experts that they spread over the same processes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.megatron_cases import Case, cases, global_batches, make_models, train_config
from tests.parity.ranks import Ranks

SPREAD = {"dp_shard": 2, "ep": 2}
LARGEST = 1e-6
"""Largest difference of a loss or a weight."""


@pytest.mark.nightly
def test_spread_experts_learn_what_megatrons_learn(megatron_ranks: Ranks, fsdp_ranks: Ranks, tmp_path: Path) -> None:
    """Five steps of SFT on packed rows; `make test` compares each engine with plain Transformers."""
    make_models(tmp_path / "models")
    case = Case("qwen3-moe", SPREAD)
    index = cases(2).index(case)
    megatron_ranks.run("tests.parity.megatron_program", 2, tmp_path, json.dumps([index]), log=tmp_path / "megatron.txt")
    expected = torch.load(tmp_path / "results" / f"2-{index}.pt", weights_only=True)["losses"]

    fields = {"model": str(tmp_path / "models" / case.model), "config": {**train_config(case), "engine": "fsdp"}}
    spec = {"data": global_batches(case.data), "cases": {"spread": fields}, "output": str(tmp_path)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    fsdp_ranks.run("tests.parity.fsdp_program", 2, tmp_path / "spec.json", log=tmp_path / "fsdp.txt")
    assert json.loads((tmp_path / "spread.json").read_text())["losses"] == pytest.approx(expected, rel=0, abs=LARGEST)
    found, others = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "spread", tmp_path / "exported" / f"2-{index}")
    )
    assert found.keys() == others.keys()
    assert max((found[name] - one).abs().max().item() for name, one in others.items()) <= LARGEST
