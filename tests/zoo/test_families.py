"""Every family of the zoo can be trained: its documents packed, or as rows of their own."""

from __future__ import annotations

import pytest

from stages.engines.fsdp.probe import probe
from tests.zoo.models import tiny_config
from tests.zoo.text import TEXT_FAMILIES


@pytest.mark.nightly
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_documents_of_every_family_can_be_trained(family: str) -> None:
    verdict = probe(tiny_config(family), trust_remote_code=False)
    assert verdict.sentence.startswith("documents train ")
