"""Plans refuse tp and cp by what a walk sees of a family's code, which is what training measures at its start."""

from pathlib import Path

import pytest

from stages.engines.fsdp.probe import probe
from stages.models.walk import walk
from stages.parallel.engines.fsdp import FsdpRules
from tests.zoo.models import FAMILIES, tiny_config
from tests.zoo.proofs import split_of
from tests.zoo.splitting import fields_to_split
from tests.zoo.table import recorded

READ = [family for family in FAMILIES if recorded()[family]["documents"] in ("packed", "rows")]
"""Families that are read as language models."""
QUICK = ("gemma2", "nemotron", "llama4_text", "falcon_h1")
FLAWED = ("apertus", "gemma3n_text", "llama4_text", "qwen3_vl_moe", "gemma4")
"""Families whose code a plan of tensor parallelism does not fit."""


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.nightly) for family in READ]
)
def test_a_walk_sees_how_tokens_reach_others_as_the_probe_measures_it(family: str) -> None:
    config = tiny_config(family)
    shape, verdict = walk(config), probe(config, trust_remote_code=False)
    assert shape.packs == verdict.packs, verdict.sentence
    if verdict.packs:
        assert any(kind.carries_state for kind in shape.kinds) == bool(verdict.mixers), verdict.sentence


@pytest.mark.nightly
def test_a_start_refuses_the_plans_that_a_walk_finds_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_families.py` shows that it refuses no others."""
    found = {family for family in FAMILIES if walk(tiny_config(family, **fields_to_split(family))).split_flaw}
    assert found == {*FLAWED, "llama4"}  # whose text is one of them, and which is not read as a language model
    monkeypatch.setattr(FsdpRules, "model_errors", lambda *_: ())
    refused = ("differs from the whole model", "does not run", "mixed torch.Tensor and DTensor")
    outcomes = {family: one["tp"] for family, one in split_of(FLAWED, tmp_path, ["tp"]).items()}
    assert {family: one for family, one in outcomes.items() if not any(word in one for word in refused)} == {}
