"""Families that plans refuse by name are still those that a training's start would refuse: a name of another is stale.

`stages/models/known_splits.py` lists them. Of a family that is missing there, the zoo's table shows a start's refusal.
"""

from pathlib import Path

import pytest

from stages.models.known_splits import IN_ROWS, WITH_STATES_BESIDE, WRONG_PLANS
from stages.parallel.engines import fsdp
from tests.zoo.proofs import save_family
from tests.zoo.splitting import split

MEASURED = {
    "cp": "train as rows of their own|carry a state along the tokens",
    "tp": "differs from the whole model|does not run",
}
"""Words of the start, by degree, that refuse a family which cannot be split in this way."""
KNOWN = {"cp": IN_ROWS | WITH_STATES_BESIDE, "tp": WRONG_PLANS}


@pytest.mark.parametrize(
    ("column", "families"),
    [
        ("cp", {"nemotron"}),
        *(pytest.param(column, families, marks=pytest.mark.nightly) for column, families in KNOWN.items()),
    ],
    ids=["nemotron", *KNOWN],
)
def test_each_family_is_refused_when_it_is_measured(
    column: str, families: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IN_ROWS", "WITH_STATES_BESIDE", "WRONG_PLANS"):
        monkeypatch.setattr(fsdp, name, frozenset())
    folders = {family: tmp_path / family for family in sorted(families)}
    for family, folder in folders.items():
        save_family(family, folder)
    outcomes = {family: found[column] for family, found in split(folders, [column], tmp_path).items()}
    stale = {
        family: outcome
        for family, outcome in outcomes.items()
        if not any(one in outcome for one in MEASURED[column].split("|"))
    }
    assert stale == {}
