"""Champions in a real MLflow model registry, with unusual score names, and with artifacts missing from the store."""

import pytest
from click.testing import CliRunner

from flows.champion.registrations import Registration
from flows.champion.registry import CHALLENGER, CHAMPION, PREVIOUS, Registry
from flows.cli.main import cli
from stages.core.errors import StoreError
from tests.promotion import NAME, own_mlflow


@pytest.fixture
def registry(tmp_path, monkeypatch):
    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return Registry()


def make_champion(registry, mark, former=None, **scores):
    """Register and promote a model version whose artifact does not exist in any store."""
    registration = Registration(
        name=NAME, model=f"train/{mark}", digest=mark, evaluations=("evaluate/scores",), scores=scores
    )
    version = registry.register(registration, former and former.number)
    registry.promote(version, former and former.number)
    return version


def test_scores_may_have_names_that_mlflow_would_refuse(registry):
    make_champion(registry, "a" * 12, **{"human_eval.pass@1": 0.5, "mmlu.acc,strict-match (5 shots)": 0.25})
    from mlflow import MlflowClient  # a second that each pytest worker would take to collect tests

    tags = MlflowClient().get_model_version_by_alias(NAME, CHAMPION).tags
    scores = {tag: value for tag, value in tags.items() if tag.startswith("lifecycle.score.")}
    assert scores == {
        "lifecycle.score.human_eval.pass_1": "0.5",
        "lifecycle.score.mmlu.acc_strict-match _5 shots_": "0.25",
    }


def canary(*arguments):
    return CliRunner().invoke(cli, ["canary", NAME, *arguments])


def test_a_challenger_is_named_shown_withdrawn_and_promoted(registry):
    """`lifecycle canary` names, withdraws and promotes a challenger.

    It fails at showing the champion, whose artifacts are missing here, only after it has moved the aliases.
    """
    first = make_champion(registry, "a" * 12)
    second = registry.register(Registration(name=NAME, model="train/b", digest="b", evaluations=()))
    canary(second.number)
    assert registry.find(NAME, CHALLENGER).number == second.number
    canary("--withdraw")
    assert registry.find(NAME, CHALLENGER) is None
    with pytest.raises(StoreError, match="it is the champion"):
        registry.challenge(first)
    registry.withdraw_challenger(NAME)  # there is none: nothing to do
    with pytest.raises(StoreError, match="has no challenger of that name"):
        registry.promote_challenger(NAME)

    canary(second.number)
    canary("--promote")
    found = {alias: registry.find(NAME, alias) for alias in (CHAMPION, PREVIOUS, CHALLENGER)}
    assert {alias: one and one.number for alias, one in found.items()} == {
        CHAMPION: second.number,
        PREVIOUS: first.number,
        CHALLENGER: None,
    }
    assert found[CHAMPION].predecessor == first.number
    assert registry.rollback(NAME).number == first.number


@pytest.mark.parametrize("arguments", [("2", "--promote"), ("--promote", "--withdraw"), ("2", "--withdraw")])
def test_one_thing_is_done_with_a_challenger_at_a_time(arguments):
    answer = canary(*arguments)
    assert answer.exit_code == 2
    assert "expected one of VERSION, --promote and --withdraw" in answer.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--follow", "--canary", "10"), "such as 10%"),
        (("--follow", "--canary", "0%"), "more than 0% up to 100%"),
        (("--follow", "--canary", "101%"), "more than 0% up to 100%"),
        (("--canary", "10%"), "with --follow"),
        (("--follow", "--canary-gate", "10"), "expected --canary, too"),
        (("--follow", "--sample-requests", "10%"), "are given together"),
        (("--follow", "--samples", "folder"), "are given together"),
        (("--sample-requests", "10%", "--samples", "folder"), "with --follow"),
    ],
)
def test_options_of_a_followed_champion_that_do_not_go_together_are_refused(arguments, said):
    answer = CliRunner().invoke(cli, ["serve", f"models:/{NAME}@champion", *arguments])
    assert answer.exit_code == 2
    assert said in " ".join(answer.output.replace("│", " ").split())
