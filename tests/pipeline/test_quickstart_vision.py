"""The quickstart of models that see: a few of its steps change model and processor files into an export that reads."""

import json
import math

import pytest
from refreshes import ROOT, ForkedHome, states

from stages.models.processor import FILES, MediaProcessor

RECIPE = ROOT / "configs" / "quickstart-vision.yaml"
FEW_STEPS = ("--set", "stages.sft.steps=20", "--set", "stages.sft.warmup_steps=2", "--until", "sft")


@pytest.fixture(scope="module")
def refreshed(lent_home):
    """Provide the lifecycle home of a refresh of 20 steps, and the refresh's JSON output."""
    home = ForkedHome(lent_home)
    done = home.lifecycle("run", str(RECIPE), *FEW_STEPS, "--json")
    assert done.returncode == 0, done.stderr
    return home, json.loads(done.stdout)


def test_twenty_steps_learn_from_pictures_and_export_a_model_that_sees(refreshed):
    home, record = refreshed
    assert set(states(record).values()) == {"built"}
    sft, base = (
        home.folder / "store" / record["stages"][name]["kind"] / f"{name}-{record['stages'][name]['version']}" / "model"
        for name in ("sft", "base")
    )
    assert record["stages"]["sft"]["metrics"]["num_media"] == 8000
    assert record["stages"]["sft"]["metrics"]["evaluation_loss"] < math.log(320) - 1, "a guess among all tokens"
    made, given = ({name: (one / name).read_bytes() for name in FILES if (one / name).exists()} for one in (sft, base))
    assert made == given, "pictures have the same pixels wherever the model is used"
    assert MediaProcessor(sft).num_tokens(32, 16) == 2, "a token for each digit"
