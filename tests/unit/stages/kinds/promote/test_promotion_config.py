"""Mistakes in promotion configs are found before anything runs. Stage names do not affect a promotion's version."""

from pathlib import Path

import pytest

from flows.recipe.recipe import load_stages
from flows.recipe.version import identity_of
from stages.core.errors import RecipeError
from tests.promotion import candidate_tree


def load(changes=(), **promote):
    tree = candidate_tree("a") | dict(changes)
    tree["promote"] = {**tree["promote"], **promote}
    return load_stages("small", Path("/"), tree).stages["promote"]


OTHER = {
    "other": {"kind": "download", "model": "builtin/qwen3-1m", "files": ["b"]},
    "other-server": {"kind": "serve", "model": "other"},
    "other-scores": {"kind": "evaluate", "model": "other-server", "tasks": ["sums"]},
}


@pytest.mark.parametrize(
    ("promote", "message"),
    [
        ({"evaluations": ["other-scores"]}, "evaluations.0: other-scores evaluates other; expected .* of model"),
        ({"server": "other-server"}, "server: other-server serves other; expected a server of model"),
        ({"evaluations": ["model"]}, "evaluations: refers to model, which produces a model; expected a scores"),
        ({"evaluations": ["score"]}, "evaluations: there is no stage `score`; did you mean `scores`"),
        ({"evaluations": []}, "evaluations"),
        ({"name": "a/b"}, "name"),
        ({"gates": {"min_output_tokens_per_s": 5}}, "nothing measures it; name a serve stage"),
        ({"gates": {"max_kl_nats_per_token": 0.1}}, "model is not quantized"),
        ({"gates": {"max_kl_nats_per_token": 1e300}}, "expected less than or equal to 12"),
        ({"gates": {"max_abs_logprob_difference": 13}}, "expected less than or equal to 12"),
        (
            {"gates": {"max_abs_logprob_difference": 0.1}},
            "max_abs_logprob_difference: nothing measures it: .*, not ",
        ),
        ({"execution": {"launcher": "slurm"}}, "execution.launcher: .* expected local"),
    ],
)
def test_what_cannot_be_meant_is_told(promote, message):
    with pytest.raises(RecipeError, match=message):
        load(OTHER, **promote)


def test_evaluations_and_baselines_are_references_and_their_versions_are_identity():
    config = load(OTHER, baselines=["other-scores"])
    assert config.references() == {"model": "model", "evaluations.0": "scores", "baselines.0": "other-scores"}
    identity = identity_of(config, {"model": "1", "scores": "2", "other-scores": "3"}, {})
    assert identity["upstream"] == {"model": "1", "evaluations.0": "2", "baselines.0": "3"}
    assert not {"model", "evaluations", "baselines"} & identity["config"].keys()


def test_who_is_champion_is_no_identity_so_that_a_judged_candidate_stays_cached():
    identity = identity_of(load(), {"model": "1", "scores": "2"}, {})
    assert identity["outside"] == {}
    assert identity["config"]["name"] == "adder"


def test_a_promotion_waits_for_no_device():
    assert load().devices == 0
