"""Every family of the zoo does what the table of families shows."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from stages.core.errors import ModelError
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.packed import packed
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.walked import shape_of
from stages.parallel.layout import Layout
from tests.unit.stages.engines.test_attention import check_family
from tests.zoo.models import FAMILIES
from tests.zoo.proofs import COLUMNS, LEARNING_RATE, one_process, result_of, save_family, served_of, split_of
from tests.zoo.serving import SERVED
from tests.zoo.table import UNTRIED, WORKS, recorded

WITH_MIXERS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "mamba", "mamba2", "bamba", "granitemoehybrid",
    "jamba", "falcon_h1", "lfm2", "lfm2_moe", "recurrent_gemma", "nemotron_h", "zamba2", "minimax", "rwkv",
    "kimi_linear", "olmo_hybrid",
)  # fmt: skip
"""Families that carry something along the sequence, beside attention or instead of it."""
IN_ROWS = [
    family
    for family, cells in recorded().items()
    if cells["documents"] == "rows" and cells.get("pictures", UNTRIED) == UNTRIED
]
"""Families of text whose documents train as rows of their own."""


@pytest.mark.nightly
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_table_shows(family: str, column: str, tmp_path: Path) -> None:
    """A cell that now works is a failure, too: `python -m tests.zoo.proofs FAMILY` records it."""
    outcome = result_of(column, family, tmp_path)
    assert _in_short(outcome) == _in_short(recorded()[family][column]), outcome


@pytest.mark.nightly
@pytest.mark.parametrize("family", WITH_MIXERS)
def test_packed_documents_teach_a_family_with_mixers_what_each_alone_does(family: str) -> None:
    check_family(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", IN_ROWS)
def test_compiled_layers_learn_the_same_of_documents_as_rows_of_their_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled without Inductor: what makes one graph of all shapes comes before it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    save_family(family, tmp_path)
    counters.clear()
    eager, compiled = (losses(tmp_path, Layout(compile=one)) for one in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-6)
    # Of each kind of layers and of what is done to logits: of several rows and of one.
    assert counters["stats"]["unique_graphs"] <= 8 and not counters["graph_break"]
    torch._dynamo.reset()


def losses(folder: Path, layout: Layout) -> list[float]:
    """Return losses and gradient norms of steps whose batches have other numbers and lengths of documents."""
    settings = EngineSettings(layout, "fp32", AdamSettings(LEARNING_RATE))
    found = []
    with one_process():
        engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
        for lengths in ((12, 7, 9), (20, 8), (28,), (5, 5, 13, 5), (3, 25), (19,)):
            torch.manual_seed(0)
            batch = packed(torch.randint(1, 49, (sum(lengths),)).split(lengths))
            step = engine.train_step([batch], SftLoss(), LEARNING_RATE, None)
            found += [step.loss, step.grad_norm]
        engine.close()
    return found


@pytest.mark.nightly
def test_vllm_serves_the_families_that_the_table_shows(tmp_path: Path) -> None:
    """`make test` serves a Qwen3 (`test_serve_evaluate.py` of the pipeline)."""
    outcomes = served_of(FAMILIES, tmp_path)
    shown = {family: recorded()[family].get(SERVED, UNTRIED) for family in FAMILIES}
    changed = {
        family: outcome for family, outcome in outcomes.items() if _in_short(outcome) != _in_short(shown[family])
    }
    assert changed == {}


def _in_short(outcome: str) -> str:
    return outcome if outcome in WORKS else "no"


@pytest.mark.nightly
def test_two_processes_split_the_families_that_the_table_shows(tmp_path: Path) -> None:
    """One pair of processes trains them all; `make test` splits a few (`tests/parity/test_fsdp.py`)."""
    outcomes = split_of(FAMILIES, tmp_path)
    found = {family: {column: _in_short(one) for column, one in cells.items()} for family, cells in outcomes.items()}
    assert found == {
        family: {column: _in_short(recorded()[family][column]) for column in cells} for family, cells in found.items()
    }


@pytest.mark.nightly
def test_a_config_that_makes_no_model_is_not_walked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    notes: list[str] = []
    for _ in range(2):
        with pytest.raises(ModelError, match="vit"):
            shape_of(ModelFacts({"model_type": "vit"}), notes.append)
    assert len(notes) == 1
