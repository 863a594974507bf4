"""Both engines have the same loss curve for the same recipe; on several ranks, stages report further metrics."""

import pytest

from stages.core.contract import StageResult
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

TOLERANCES = {12: 1e-5, 50: 1e-4}
"""Absolute tolerance of a loss by the number of training steps, since each step amplifies rounding."""
LEARNED = {12: 0.9, 50: 0.6}
"""Largest allowed ratio of the last loss to the first, by the number of training steps."""
LAYOUTS = {
    "fsdp, two processes": ("fsdp", {"dp_shard": 2, "micro_batch_size": 2}),
    "megatron TP2": ("megatron", {"tp": 2, "micro_batch_size": 2}),
    "megatron PP2": ("megatron", {"pp": 2, "micro_batch_size": 1}),
    "megatron DP2": ("megatron", {"dp_shard": 2, "micro_batch_size": 2}),
}

BY_NIGHT = "megatron DP2"
"""Layout that only the long curves have: `test_megatron_layouts.py` compares five of its steps."""


@pytest.fixture(scope="module", params=[12, pytest.param(50, marks=pytest.mark.nightly)])
def num_steps(request):
    return request.param


@pytest.fixture(scope="module")
def runs(num_steps, tmp_path_factory):
    """Provide the work folders of train stages on the quickstart's model and data, by layout."""
    root = tmp_path_factory.mktemp("curves")
    artifacts = make_artifacts(root)
    works = {}
    chosen = [name for name in LAYOUTS if num_steps > 12 or name != BY_NIGHT]
    for number, name in enumerate(chosen):
        engine, layout = LAYOUTS[name]
        works[name] = root / f"work-{number}"
        config = make_config(
            steps=num_steps,
            learning_rate=2e-3,  # from the first step on, where rounding is amplified the most
            warmup_steps=0,
            engine=engine,
            layout=layout,
            execution={"measure_matmul_rate": False},
        )
        make_context(works[name], artifacts, config)
        run_to_end(works[name], config)
    return works


def test_the_loss_curves_of_the_engines_are_one(runs, num_steps):
    expected, *others = ([row["loss"] for row in logged(work)] for work in runs.values())
    assert len(expected) == num_steps
    assert expected[-1] < LEARNED[num_steps] * expected[0]
    for name, losses in zip(list(runs)[1:], others, strict=True):
        assert losses == pytest.approx(expected, abs=TOLERANCES[num_steps]), name


def test_held_out_losses_are_one(runs, num_steps):
    expected, *others = (result(work).metrics["evaluation_loss"] for work in runs.values())
    assert others == pytest.approx([expected] * len(others), abs=TOLERANCES[num_steps])


def test_the_bubble_is_measured_beside_the_prediction(runs):
    rows = logged(runs["megatron PP2"])
    assert all(0 <= row["pipeline_bubble_fraction"] < 1 for row in rows)
    assert result(runs["megatron PP2"]).metrics["predicted_pipeline_bubble_fraction"] == pytest.approx(1 / 5, abs=0.1)
    assert "pipeline_bubble_fraction" not in logged(runs["megatron TP2"])[0]


def test_every_rank_tells_its_memory(runs):
    for work in runs.values():
        last = logged(work)[-1]
        ranks = [last["peak_memory_gib_rank_0"], last["peak_memory_gib_rank_1"]]
        assert last["peak_memory_gib"] == max(ranks)
        assert min(ranks) > 0


def test_communication_is_measured_and_the_layout_is_a_tag(runs):
    assert [row["step"] for row in logged(runs["megatron TP2"]) if "communication_fraction" in row] == [3]
    tags = result(runs["megatron TP2"]).tags
    assert (tags["engine"], tags["layout"]) == ("megatron", "megatron tp=2 micro_batch_size=2")


def result(work):
    return StageResult.model_validate_json((work / "result.json").read_text())
