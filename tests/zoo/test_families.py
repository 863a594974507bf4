"""Every family of the zoo does what the table of families shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.models import FAMILIES
from tests.zoo.proofs import COLUMNS, result, save_family
from tests.zoo.table import WORKS, recorded


@pytest.mark.nightly
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_table_shows(family: str, column: str, tmp_path: Path) -> None:
    """A cell that now works is a failure, too: `python -m tests.zoo.proofs FAMILY` records it."""
    outcome, shown = result(column, save_family(family, tmp_path)), recorded()[family][column]
    assert (outcome if outcome in WORKS else "no") == (shown if shown in WORKS else "no"), outcome
