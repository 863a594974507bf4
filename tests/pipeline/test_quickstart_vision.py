"""The quickstart of models that see: twenty steps on some of its pictures by day, the chain to a champion by night."""

import json
import math

import pytest
from refreshes import ROOT, Home, states

from flows.recipe.recipe import load_recipe
from stages.hubs.builtin import digits, qwen3_vl
from stages.kinds.train import run as training
from stages.models.facts import PROCESSOR_FILES
from stages.models.processor import MediaProcessor
from tests.train_stage import make_context

RECIPE = ROOT / "configs" / "quickstart-vision.yaml"
SCORE = "digits.exact_match"


def test_twenty_steps_learn_from_pictures_and_export_a_model_that_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "NUM_ROWS", {"train": 400, "validation": 40, "test": 0})
    base, data = tmp_path / "base" / "model", tmp_path / "pictures" / "data"
    for folder, make in ((base, qwen3_vl.make), (data, digits.make)):
        folder.mkdir(parents=True)
        make(folder)
    config = load_recipe(RECIPE, ["stages.sft.steps=20", "stages.sft.warmup_steps=2"]).stages["sft"]
    inputs = {"base": base.parent, "pictures": data.parent}
    result = training.run(config, make_context(tmp_path / "work", inputs, config))
    assert result.metrics["num_media"] == 400
    listed = (tmp_path / "work" / "media.sha256").read_text().splitlines()
    assert result.metrics["num_different_pictures"] == len({line[:64] for line in listed}) <= 400
    assert len(result.tags["media_sha256"]) == 64
    assert result.metrics["evaluation_loss"] < math.log(320) - 1, "a guess among all tokens"
    made, given = (
        {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).exists()}
        for folder in (tmp_path / "work" / "model", base)
    )
    assert made == given, "pictures have the same pixels wherever the model is used"
    assert MediaProcessor(tmp_path / "work" / "model").num_tokens((32, 16)) == 2, "a token for each digit"


@pytest.mark.nightly
def test_the_whole_chain_reads_two_digits_and_is_promoted_and_then_cached(tmp_path):
    """The quickstart makes a champion that reads 95 of 100 held-out pictures through vLLM.

    `make test` covers its training by the test above, and its other stages with pictures in the tests of their kinds.
    """
    home = Home(tmp_path / "home")
    try:
        first = json.loads(home.lifecycle("run", str(RECIPE), "--json").stdout)
        assert set(states(first).values()) == {"built"}
        metrics = {name: stage["metrics"] for name, stage in first["stages"].items()}
        assert metrics["evaluate-base"][SCORE] <= 0.05
        assert metrics["evaluate-sft"][SCORE] >= 0.95
        assert metrics["evaluate-awq"][SCORE] >= 0.95
        assert metrics["dpo"]["evaluation_preference_accuracy"] >= 0.9
        assert metrics["awq"]["kl_nats_per_token"] <= 0.01
        assert home.lifecycle("champion", "digit-reader").returncode == 0
        again = json.loads(home.lifecycle("run", str(RECIPE), "--json").stdout)
        assert set(states(again).values()) == {"cached"}
    finally:
        home.lifecycle("down")
