"""On fake GPUs, each rank of both engines holds and sends as many bytes in a step as published formulas say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts
from stages.models.processor import MediaProcessor
from stages.models.shape import ModelShape
from stages.planner.costs import StepCase
from stages.planner.engines.registry import COSTS
from stages.planner.kernels import layer_kernels
from stages.planner.memory import GIB, memory
from stages.planner.workload import RowMedia
from tests.fake_gpu.models import WALKED, write_model
from tests.fake_gpu.rig import CASES, EXACT, LORA, PICTURES, SOUNDS, Case, Report, run
from tests.unit.stages.data.reports import Reports

Weights = list[tuple[int, int]]
"""Type of a list of weight shapes as (rows, columns); a norm has one column."""

FSDP = {
    "sharded": Case("qwen3-8b", {"dp_shard": 8}, num_layers=2),
    "hybrid": Case(
        "qwen3-8b",
        {"dp_shard": 4, "dp_replicate": 2, "recompute": "selective", "accumulate": "sharded"},
        num_layers=2,
        micro_batches=2,
    ),
}
TENSOR_PARALLEL = Case("qwen3-8b", {"dp_shard": 4, "tp": 2}, engine="megatron", num_layers=2)
PIPELINE = Case(
    "qwen3-8b",
    {"dp_shard": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    engine="megatron",
    num_layers=4,
    micro_batches=4,
)


DENSE = ("hybrid, gathered once", "selective", "full, micro-batches", "micro-batches, sharded", "1,024 ranks")
"""Names of nightly cases in which FSDP2 trains all weights of a dense model."""


COUNTED = {
    "sharded": Case("qwen3-8b", {"dp_shard": 8}),
    "LoRA": Case("qwen3-8b", {"dp_shard": 8}, options=LORA),
    "one GPU": Case("qwen3-8b", {}),
    "one GPU, LoRA": Case("qwen3-8b", {}, options=LORA),
    "experts": Case("qwen3-30b-a3b", {"dp_shard": 8}, sequence_length=512),
    "megatron": Case("qwen3-8b", {}, engine="megatron"),
    "megatron, LoRA": Case("qwen3-8b", {}, engine="megatron", options=LORA),
}
"""Cases whose kernels are counted, in two and in four layers."""

UNSPLIT = ("gpt_oss", "bamba", "lfm2")
"""Families of which Transformers has no plan of tensor parallelism."""
OFFLOAD = Case("qwen3-0.6b", {"dp_shard": 8, "recompute": "offload", "micro_batch_size": 4}, num_layers=6)


def test_activations_on_the_host_take_no_memory_of_the_device(tmp_path: Path) -> None:
    report = run(OFFLOAD, tmp_path / "model")
    assert report.num_waits <= 1
    _check_plan(report)
    here = report.layout.model_copy(update={"recompute": "none"})
    kept = memory(report.shape, "fsdp", here, OFFLOAD.config.workload, efficiency=EXACT)
    assert kept.peak_gib * GIB > 1.3 * report.peak_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(DENSE)))
def test_a_step_runs_as_the_planner_predicts(name: str, tmp_path: Path) -> None:
    report = run(CASES[name], tmp_path / "model")
    assert sum(report.bytes_at_peak.values()) == report.peak_bytes
    assert report.num_waits <= 1
    _check_plan(report)


def test_logits_of_a_large_vocabulary_are_never_whole(tmp_path: Path) -> None:
    case = CASES["matrices, large vocabulary"]
    report = run(case, tmp_path / "model")
    _check_plan(report)
    in_bf16 = 2 * case.sequence_length * report.shape.vocab_size
    assert report.peak_bytes - sum(report.held_bytes.values()) < in_bf16  # with gradients of the head, in fp32


@pytest.mark.nightly
@pytest.mark.parametrize("family", WALKED)
def test_a_step_of_a_walked_family_takes_the_memory_that_the_planner_predicts(family: str, tmp_path: Path) -> None:
    # One layer of this one is narrower than LoRA's rank.
    adapter = {**LORA["adapter"], "exclude_modules": ["shared_expert_gate"] if family == "qwen3_next" else []}
    for name, options in {"whole": {}, "LoRA": {"adapter": adapter}}.items():
        _check_plan(run(Case(family, {"dp_shard": 8}, options=options), tmp_path / name))


@pytest.mark.nightly
@pytest.mark.parametrize("family", [family for family in WALKED if family not in UNSPLIT])
def test_a_step_of_a_walked_family_whose_matrices_are_split_runs_as_the_planner_predicts(
    family: str, tmp_path: Path
) -> None:
    _check_plan(run(Case(family, {"dp_shard": 4, "tp": 2}), tmp_path / "model"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [*PICTURES.values(), *SOUNDS.values()], ids=[*PICTURES, *(f"{name}, sounds" for name in SOUNDS)]
)
def test_a_step_with_media_takes_the_memory_that_the_planner_predicts(case: Case, tmp_path: Path) -> None:
    assert run(case, tmp_path / "model").predicted_ratio == pytest.approx(1, abs=0.1)


@pytest.mark.nightly
def test_rows_within_the_bound_of_patches_stay_within_the_plan(tmp_path: Path) -> None:
    case = replace(PICTURES["tower alone"], layout={"dp_shard": 64, "micro_batch_size": 4})
    facts, data = ModelFacts(write_model(tmp_path / "model", case.model, case.num_layers)), tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (640, 480)).save(data / "a.png")
    row = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "n1"}]}
    rows = [json.dumps({**row, "images": ["a.png"]}) for _ in range(12)]
    (data / "train.jsonl").write_text("\n".join(rows))
    bound = MediaProcessor(facts.folder).num_patches((640, 480))
    most, peaks = [], []
    for options in ({}, {"max_patches": bound}):
        config = DataConfig(dataset="rows", sequence_length=case.sequence_length, train_on="all", **options)
        dataset = prepare(
            data, config, facts, rows="examples", cache=tmp_path, report=Reports(), bad_rows_file=tmp_path / "bad"
        ).training
        # Pictures of equal size: as many patches as the fullest row has.
        most.append(max(sum(map(len, dataset.media(row))) for row in range(len(dataset))))
        report = run(replace(case, media=most[-1]), tmp_path / f"model-{most[-1]}")
        peaks.append(report.peak_bytes)
    planned = replace(case.config.workload, media=(RowMedia(bound, bound),))
    predicted = memory(report.shape, "fsdp", report.layout, planned, efficiency=EXACT).peak_gib * GIB
    assert most == [7, 1]
    assert peaks[1] <= predicted < peaks[0] / 1.05


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in FSDP.items()),
        *(pytest.param(CASES[name], id=name, marks=pytest.mark.nightly) for name in DENSE),
    ],
)
def test_fsdp_holds_and_sends_its_shards(case: Case, tmp_path: Path) -> None:
    report = run(case, tmp_path / "model")
    assert report.num_waits <= 1
    shape, layout = report.shape, report.layout
    shards, replicas, passes = layout.dp_shard, layout.dp_replicate, 1 + layout.reshard_after_forward
    of_passes = [(shape.vocab_size, shape.hidden_size), *_layer(shape) * shape.num_layers]
    of_root = [(shape.vocab_size, shape.hidden_size), (shape.hidden_size, 1)]  # head and last norm, kept between
    weights = [*of_passes, *of_root]
    held = _shard(weights, shards)
    # fp32 weights, Adam's two moments, and its count of steps, a number a weight
    assert report.held_bytes == {"parameters": 4 * held, "optimizer": 8 * held + 4 * len(weights)}

    # Zhao et al. 2023 (FSDP), section 3.2: weights are gathered in bf16 for the forward pass and, if they were freed,
    # for the backward pass, of every micro-batch; gradients are reduced in fp32, and summed over replicas once.
    entries = passes * _shard(of_passes, shards) + _shard(of_root, shards)
    assert report.collectives["allgather", shards] == case.micro_batches * 2 * shards * entries
    reductions = case.micro_batches if layout.accumulate == "sharded" else 1
    assert report.collectives["reduce_scatter", shards] == reductions * 4 * shards * held
    if replicas > 1:
        assert report.collectives["allreduce", replicas] == 4 * held
    _check_plan(report)


def test_megatron_holds_and_sends_under_tensor_parallelism(tmp_path: Path) -> None:
    report, tp, dp = run(TENSOR_PARALLEL, tmp_path / "model"), 2, 4
    shape, tokens = report.shape, TENSOR_PARALLEL.sequence_length
    assert report.num_waits <= 1
    vocabulary = (shape.vocab_size, shape.hidden_size)
    held = _split([vocabulary, *_layer(shape) * shape.num_layers, vocabulary, (shape.hidden_size, 1)], tp)
    _check_states(report.held_bytes, held, dp)
    assert report.collectives["reduce_scatter_tensor_coalesced", dp] == 4 * held
    assert report.collectives["allgather_into_tensor_coalesced", dp] == 2 * held

    # Shoeybi et al. 2019, section 3: two all-reduces a layer, forward and backward, one after the embedding and one
    # before the head. The cross-entropy reduces three numbers a token in fp32: maximum, logit of the target, sum.
    states = 2 * tokens * shape.hidden_size
    of_layers = (4 * shape.num_layers + 2) * states
    of_head_norms = shape.num_layers * 4 * 2 * shape.head_dim  # gradients of norms that every rank has for its heads
    assert report.collectives["allreduce", tp] == of_layers + 3 * 4 * tokens + of_head_norms
    _check_plan(report)


def test_megatron_holds_and_sends_in_the_first_pipeline_stage(tmp_path: Path) -> None:
    report, tp, dp, num_layers = run(PIPELINE, tmp_path / "model"), 2, 4, 2
    shape, tokens = report.shape, PIPELINE.sequence_length
    assert report.num_waits <= 1
    layers = _layer(shape) * num_layers
    held = _split([(shape.vocab_size, shape.hidden_size), *layers], tp)
    _check_states(report.held_bytes, held, dp)
    assert report.collectives["reduce_scatter_tensor_coalesced", dp] == 4 * held
    assert report.collectives["allgather_into_tensor_coalesced", dp] == 2 * held

    # Korthikanti et al. 2022, section 4.2.2: an all-reduce becomes an all-gather and a reduce-scatter; Megatron keeps
    # the split input of a column-parallel product, and gathers it again for the gradient of its weight.
    states = 2 * tokens * shape.hidden_size
    assert report.collectives["allgather", tp] == PIPELINE.micro_batches * (6 * num_layers + 1) * states
    assert report.collectives["reduce_scatter", tp] == PIPELINE.micro_batches * (4 * num_layers + 1) * states
    norms = sum(rows for rows, columns in layers if columns == 1)
    assert report.collectives["allreduce", tp] == 4 * norms
    assert report.collectives["send", 2] == report.collectives["recv", 2] == PIPELINE.micro_batches * states // tp
    _check_plan(report)


def _check_plan(report: Report) -> None:
    """Check that the planner knows a rank's peak memory within 10%, and the bytes of its collectives within 1%."""
    assert report.predicted_ratio == pytest.approx(1, abs=0.1)
    assert report.traffic_error <= 0.01


def _layer(shape: ModelShape) -> Weights:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), (ffn, hidden), (ffn, hidden)]
    return [*products, (hidden, ffn), *[(hidden, 1)] * 2, *[(shape.head_dim, 1)] * (2 * shape.qk_norm)]


def _shard(weights: Weights, num_ranks: int) -> int:
    """Count the weight elements that FSDP2 keeps on the first rank: each weight's rows are split evenly, rounded up."""
    return sum(-(-rows // num_ranks) * columns for rows, columns in weights)


def _split(weights: Weights, tp: int) -> int:
    """Count the weight elements that a tensor-parallel rank holds: its share of the matrices, and all norms."""
    return sum(rows * columns // (tp if columns > 1 else 1) for rows, columns in weights)


def _check_states(held_bytes: dict[str, int], held: int, dp: int) -> None:
    """Check a Megatron rank's bytes (Rajbhandari et al. 2020, 5.1): bf16 weights, fp32 gradients, sharded states."""
    assert held_bytes == {"parameters": 2 * held, "gradients": 4 * held, "optimizer": 12 * held // dp}


@pytest.mark.parametrize(
    "name", ["sharded", *(pytest.param(one, marks=pytest.mark.nightly) for one in COUNTED if one != "sharded")]
)
def test_a_layer_launches_as_many_kernels_as_the_planner_says(name: str, tmp_path: Path) -> None:
    # Documents of many lengths, as flash attention takes them.
    case = replace(COUNTED[name], documents=8)
    shallow, deep = (run(replace(case, num_layers=one), tmp_path / str(one)) for one in (2, 4))
    counted = (_kernels(deep) - _kernels(shallow)) / 2
    costs = COSTS[case.engine]
    assert counted == layer_kernels(
        StepCase(deep.shape, costs, deep.layout, case.config.workload, costs.program(deep.layout))
    )


def _kernels(report: Report) -> int:
    return sum(report.forward_kernels.values())
