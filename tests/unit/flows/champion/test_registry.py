"""Champions in a real registry of MLflow: scores of any name, and one that cannot be served."""

import re
from contextlib import ExitStack

import pytest
from mlflow import MlflowClient

from flows.champion.follow import Follower, Serving
from flows.champion.registrations import Registration
from flows.champion.registry import CHAMPION, Registry
from tests.promotion import NAME, own_mlflow


@pytest.fixture
def registry(tmp_path, monkeypatch):
    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return Registry()


def make_champion(registry, mark, former=None, **scores):
    """A version whose model is in no store."""
    registration = Registration(
        name=NAME, model=f"train/{mark}", digest=mark, evaluations=("evaluate/scores",), scores=scores
    )
    version = registry.register(registration, former and former.number)
    registry.promote(version, former and former.number)
    return version


def test_scores_may_have_names_that_mlflow_would_refuse(registry):
    make_champion(registry, "a" * 12, **{"human_eval.pass@1": 0.5, "mmlu.acc,strict-match (5 shots)": 0.25})
    tags = MlflowClient().get_model_version_by_alias(NAME, CHAMPION).tags
    scores = {tag: value for tag, value in tags.items() if tag.startswith("lifecycle.score.")}
    assert scores == {
        "lifecycle.score.human_eval.pass_1": "0.5",
        "lifecycle.score.mmlu.acc_strict-match _5 shots_": "0.25",
    }


def test_a_champion_that_cannot_be_served_is_tried_again_when_the_alias_comes_back(registry, capsys):
    served = make_champion(registry, "a" * 12)
    follower, serving = Follower(registry, NAME, CHAMPION), Serving(served, None, ExitStack(), None)

    def tries() -> int:
        """How often a look at the alias has tried to serve another version."""
        assert follower._successor(serving) is None
        said = capsys.readouterr()
        return len(re.findall(f"is {CHAMPION} now", said.out + said.err))

    assert tries() == 0
    next_one = make_champion(registry, "b" * 12, served)
    assert [tries(), tries(), tries()] == [1, 0, 0]
    registry.rollback(NAME)
    assert tries() == 0
    registry.promote(next_one, served.number)
    assert [tries(), tries()] == [1, 0]
