"""A new training method needs a module and a line in the registry; recipe, schema and messages then know it."""

import json
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from stages.data.config import ROW_KINDS
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.registry import METHODS
from stages.planner.workload import ExtraPasses

TRAINING = {
    "kind": "train",
    "model": "base",
    "data": {"dataset": "pairs"},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
}
WITH_ANOTHER_METHOD = """
import json, sys
import tests.margin_method
from tests.metric_names import METRICS
from flows.recipe.recipe import json_schema
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.registry import METHODS

def identity(**fields):
    return TrainConfig.model_validate({**json.loads(sys.argv[1]), **fields}).identity()

schema = json_schema()["$defs"]
print(json.dumps({
    "sft": identity(method="sft"),
    "dpo": identity(method="dpo"),
    "margin": identity(method="margin"),
    "chosen": identity(method="margin", margin={"target": 1.0}),
    "methods": schema["TrainConfig"]["properties"]["method"]["enum"],
    "options": schema["MarginConfig"]["properties"],
    "meaning": METRICS["answer_margin"],
    "loss": METRICS["loss"],
}))
"""

SERVER = {"url": "http://host/v1", "served_model": "wise"}


def make(**fields):
    return TrainConfig.model_validate({**TRAINING, **fields})


@pytest.fixture(scope="module")
def extended():
    """Provide the output of a process in which one more training method is registered."""
    command = [sys.executable, "-c", WITH_ANOTHER_METHOD, json.dumps(TRAINING)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"method": "sft"}, ExtraPasses()),
        ({"method": "dpo"}, ExtraPasses(before_training=1)),
        ({"method": "dpo", "dpo": {"reference": "none"}}, ExtraPasses()),
        ({"method": "kto"}, ExtraPasses(before_training=2, each_step=1)),
        ({"method": "distill", "teacher": "large"}, ExtraPasses(before_training=1)),
        ({"method": "distill", "teacher": "large", "distill": {"lmbda": 0.25}}, ExtraPasses(1, each_step=0.25)),
        ({"method": "distill", "teacher": "large", "distill": {"lmbda": 1.0}}, ExtraPasses(0, each_step=1.0)),
        ({"method": "distill", "distill": {"lmbda": 0.5, "teacher_server": SERVER}}, ExtraPasses()),
        ({"method": "kto", "kto": {"loss_type": "apo_zero_unpaired"}}, ExtraPasses(before_training=1)),
    ],
)
def test_the_planner_is_given_the_passes_that_a_method_takes(fields, passes):
    workload = make(**fields).workload
    assert workload.passes == passes and not workload.scores_documents
    assert make(method="reward").workload.scores_documents


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_method_to_come_changes_no_version_of_the_others(extended, method):
    assert extended[method] == make(method=method).identity()
    assert extended[method].keys() >= {"dpo"}


def test_its_own_options_are_identity_with_their_defaults(extended):
    assert extended["margin"]["margin"] == {"beta": 2.0, "target": 0.5}
    assert extended["chosen"]["margin"] == {"beta": 2.0, "target": 1.0}
    assert extended["margin"]["dpo"] is None


def test_schema_and_metric_names_follow_the_registry(extended):
    assert extended["methods"] == [*METHODS, "margin"]
    assert extended["options"].keys() == {"beta", "target"}
    assert extended["meaning"] == "MARGIN: by how much likelier a token of the preferred answer is, in nats"
    assert extended["loss"].endswith(
        "in nats (DPO, SIMPO, REWARD, MARGIN: over pairs; "
        "ORPO, CPO: over pairs and preferred tokens; KTO: over documents)"
    )


def test_options_of_a_method_have_defaults():
    assert make(method="dpo").method_options == make(method="dpo", dpo={"beta": 0.1}).method_options
    assert make(method="dpo", dpo=None).method_options == make(method="dpo").method_options
    assert make(method="sft").method_options is None


def test_options_of_another_method_are_an_error():
    with pytest.raises(ValidationError, match="`dpo` is set but `method` is sft; remove `dpo` or say `method: dpo`"):
        make(method="sft", dpo={"beta": 0.2})


def test_an_unknown_method_is_an_error_that_lists_those_there_are():
    with pytest.raises(
        ValidationError, match="should be 'sft', 'dpo', 'simpo', 'orpo', 'cpo', 'kto', 'reward', 'distill' or 'grpo'"
    ):
        make(method="ppo")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_messages_say_whom_rows_are_for(method):
    assert re.search(rf"\b{method.name}\b", ROW_KINDS[method.rows].methods)


@pytest.mark.parametrize(
    ("method", "form", "fitting"), [("dpo", "labelled", "kto"), ("kto", "preference", "orpo"), ("kto", "text", "sft")]
)
def test_a_format_of_other_rows_names_the_methods_that_learn_from_them(method, form, fitting):
    with pytest.raises(ValidationError, match=f"no rows for `method: {method}`; expected auto or .*{fitting}"):
        make(method=method, data={"dataset": "rows", "format": form})


def test_pairs_cannot_be_trained_on_whole():
    with pytest.raises(ValidationError, match="`train_on: all` does not go with `method: dpo`"):
        make(method="dpo", data={"dataset": "pairs", "train_on": "all"})


def test_methods_are_described_without_torch():
    code = "import sys, stages.kinds.train.config; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_metric_of_a_loss_has_a_meaning(method):
    loss = method.build_loss(method.options() if method.options else None)
    assert loss.metric_names == tuple(method.metrics)
    assert set(method.headline) <= set(method.metrics)


def test_a_recipe_may_list_losses():
    recipe = json.dumps({**TRAINING, "method": "dpo", "dpo": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1, 2]}})
    assert TrainConfig.model_validate_json(recipe, strict=True).dpo.weights == {"sigmoid": 1.0, "ipo": 2.0}
