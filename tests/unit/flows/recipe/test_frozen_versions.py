"""Artifact versions and resume keys (which find unfinished work) of generated configs may not change.

Configs are read from the file, so that a change of their generator cannot loosen this test; see `frozen_versions.py`.
"""

import functools
import json

import pytest

from stages.core.contract import Execution
from stages.core.fields import models_in
from stages.kinds.registry import KINDS
from tests.unit.flows.recipe.frozen_versions import FROZEN, config_of, digests_of
from tests.unit.flows.recipe.test_version import literals


@functools.cache
def words(model):
    """Return all literal strings that a config's fields accept, including fields of nested blocks."""
    fields = model.model_fields.values()
    inner = [one for field in fields for one in models_in(field.annotation)]
    return {word for field in fields for word in literals(field.annotation)}.union(*map(words, inner))


OF_EXECUTION = {*words(Execution), "colocated"}
"""Literal strings of fields that do not affect a version: those of the block `execution`, and `grpo.placement`."""
HELD = json.loads(FROZEN.read_text())


def rows_of(kind):
    """Yield each config in `frozen_versions.json` with its frozen artifact version, its resume key and a test name."""
    bases = HELD[f"{kind} bases"]
    for base, path, value, *digests in HELD[f"{kind} digests"]:
        yield config_of(kind, bases[base], path, value), digests, f"base {base}, {path} = {json.dumps(value)}"


def texts_in(tree):
    if isinstance(tree, str):
        return {tree}
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return set().union(*map(texts_in, items))


@pytest.mark.parametrize("kind", KINDS)
def test_generated_configs_have_the_versions_and_resume_keys_that_were_frozen(kind):
    changed = {row: digests_of(config) for config, digests, row in rows_of(kind) if digests_of(config) != digests}
    assert changed == {}


def test_each_word_that_a_field_may_be_is_in_a_frozen_config():
    configs = [config.model_dump(mode="json") for kind in KINDS for config, _, _ in rows_of(kind)]
    expected = set().union(*map(words, KINDS.values())) - OF_EXECUTION
    assert expected - texts_in(configs) == set(), "give them an example in test_version.py and write the file again"


def test_there_are_many_frozen_configs():
    assert sum(len(rows) for name, rows in HELD.items() if name.endswith("digests")) >= 200
