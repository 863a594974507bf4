"""Impossible parallel layouts give errors with all sizes involved; unwise ones give warnings with the reason."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stages.models.layer_kinds import KeptBytes, LayerKind
from stages.models.shape import ModelShape
from stages.parallel.engines.megatron import bubble_fraction
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import Layout, RunConstraints
from stages.parallel.legality import is_legal, layout_errors, refusals

ROOT = Path(__file__).parents[4]
DENSE = ModelShape(
    num_layers=12, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=768, vocab_size=1000
)
STATEFUL = LayerKind(
    (0,), "layers", 0, 1, 0, 0, 0, 1.0, 1.0, (), (), (), KeptBytes(0, 0), KeptBytes(0, 0), carries_state=True
)
MIXTURE = replace(DENSE, family="qwen3_moe", num_experts=6, experts_per_token=2, expert_ffn_size=128)


def problems(engine="megatron", *, shape=DENSE, sequence=512, rows=64, nodes=1, processes=None, **degrees):
    layout = Layout(**degrees)
    constraints = RunConstraints(nodes, (processes or layout.world_size) // nodes, sequence, rows)
    errors = refusals(engine, layout, constraints, {}, shape)
    assert is_legal(engine, layout, constraints, shape, {}) == (not errors)
    return errors, list(RULES[engine].layout_warnings(layout, constraints, shape))


LEGAL = [
    {},
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True, "pp": 3},
    {"pp": 2, "vpp": 3, "dp_shard": 2},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "dp_replicate": 2},
    {"shape": MIXTURE, "dp_shard": 2, "ep": 2},
    {"shape": MIXTURE, "tp": 2, "sequence_parallel": True, "etp": 2, "cp": 2, "ep": 2},
    {"engine": "fsdp", "dp_shard": 4, "dp_replicate": 2, "compile": True, "cpu_offload": True},
    {"engine": "fsdp", "cp": 4, "tp": 2, "dp_shard": 2},
    {"engine": "fsdp", "tp": 4, "sequence_parallel": True, "dp_shard": 2},
]


@pytest.mark.parametrize("case", LEGAL)
def test_a_sound_layout_has_no_problems(case):
    assert problems(**case) == ([], [])


ILLEGAL = [
    ({"tp": 3, "shape": replace(DENSE, num_kv_heads=3)}, ["tp 3", "8 attention heads"]),
    ({"tp": 8, "shape": replace(DENSE, num_kv_heads=3)}, ["tp 8", "3 key/value heads"]),
    ({"tp": 8, "shape": replace(DENSE, ffn_size=100)}, ["tp 8", "feed-forward width 100"]),
    ({"pp": 4, "vpp": 4}, ["pp 4 × vpp 4 = 16 chunks", "12 layers"]),
    ({"vpp": 2}, ["vpp 2", "pp is 1"]),
    (
        {"pp": 4, "vpp": 3, "rows": 24, "dp_replicate": 2, "dp_shard": 2},
        ["vpp 3", "multiples of pp 4", "24 / (micro_batch_size 1 × dp_replicate 2 × dp_shard 2) = 6"],
    ),
    ({"cp": 2, "sequence": 510}, ["sequence_length 510", "2 × cp 2 = 4", "512"]),
    (
        {"cp": 2, "tp": 4, "sequence_parallel": True, "sequence": 520},
        ["sequence_length 520", "2 × cp 2 × tp 4 (sequence_parallel) = 16", "528"],
    ),
    ({"tp": 4, "sequence_parallel": True, "sequence": 510}, ["sequence_length 510", "tp 4 (sequence_parallel) = 4"]),
    ({"ep": 4, "dp_shard": 4, "shape": MIXTURE}, ["ep 4", "6 experts"]),
    ({"ep": 2, "dp_shard": 2}, ["ep 2", "llama has none"]),
    (
        {"ep": 3, "etp": 2, "dp_shard": 3, "rows": 63, "shape": MIXTURE},
        ["ep 3 × etp 2 = 6", "3 processes", "dp_shard 3 × tp 1"],
    ),
    ({"etp": 3, "dp_shard": 3, "rows": 63, "shape": MIXTURE}, ["etp 3", "width 128"]),
    (
        {"ep": 6, "dp_replicate": 2, "dp_shard": 3, "rows": 60, "shape": MIXTURE},
        ["each expert is on 1 processes", "dp_replicate 2 × dp_shard 3", "ep 6", "larger dp_shard"],
    ),
    ({"tp": 2, "shape": MIXTURE}, ["tp 2", "sequence_parallel: true"]),
    (
        {"tp": 2, "pp": 2, "cp": 2, "processes": 4},
        [
            "dp_replicate 1 × dp_shard 1 × tp 2 × pp 2 × cp 2 = 8 processes",
            "starts 4 (1 node × 4)",
            "set `tp: 1`, the nearest",
        ],
    ),
    (
        {"tp": 2, "processes": 4},
        ["tp 2 × pp 1 × cp 1 = 2 processes", "starts 4", "set `dp_shard: 2`, the nearest layout that works"],
    ),
    (
        {"dp_shard": 3, "micro_batch_size": 2},
        ["64", "micro_batch_size 2 × dp_replicate 1 × dp_shard 3 = 6", "the nearest that is: 66"],
    ),
    (
        {"engine": "megatron", "compile": True, "cpu_offload": True, "accumulate": "sharded"},
        ['cpu_offload true, compile true, accumulate "sharded"', "`engine: fsdp`", "the engine is megatron"],
    ),
    ({"recompute": "offload"}, ["`layout.recompute: offload`", "`engine: fsdp`", "found megatron"]),
    (
        {"engine": "fsdp", "tp": 3, "dp_shard": 1},
        ["tp 3 does not divide the model's", "key/value heads", "no smaller degrees make 3 processes"],
    ),
    ({"engine": "fsdp", "tp": 2, "etp": 2}, ["etp 2", "`engine: megatron`", "the engine is fsdp"]),
    (
        {"engine": "fsdp", "ep": 2, "dp_shard": 2},
        ["ep 2", "llama has none", "set `ep: 1`, the nearest layout that works"],
    ),
    (
        {"engine": "fsdp", "ep": 4, "dp_shard": 4, "shape": MIXTURE},
        ["ep 4", "6 experts", "set `ep: 2`"],
    ),
    (
        {"engine": "fsdp", "ep": 3, "dp_shard": 2, "cp": 2, "shape": MIXTURE},
        ["ep 3 does not divide dp_shard 2 × cp 2 = 4 processes", "set `ep: 2`"],
    ),
    (
        {"engine": "fsdp", "tp": 2, "dp_shard": 2, "shape": replace(DENSE, family="lfm2", has_split_plan=False)},
        ["tp 2, but Transformers has no plan of tensor parallelism for lfm2", "set `dp_shard: 4` and `tp: 1`"],
    ),
    (
        {
            "engine": "fsdp",
            "tp": 2,
            "dp_shard": 2,
            "shape": replace(DENSE, family="apertus", split_flaw="sums are missing"),
        },
        [
            "plan of tensor parallelism for apertus does not compute what the whole model does: sums are missing",
            "set `dp_shard: 4` and `tp: 1`",
        ],
    ),
    (
        {"engine": "fsdp", "cp": 2, "dp_shard": 2, "shape": replace(DENSE, family="nemotron", packs=False)},
        ["cp 2", "documents of nemotron train as rows of their own", "set `dp_shard: 4` and `cp: 1`"],
    ),
    (
        {"engine": "fsdp", "cp": 8, "sequence": 4},
        ["cp 8 leaves processes without any of the 4 tokens", "set `dp_shard: 2` and `cp: 4`"],
    ),
    (
        {"engine": "fsdp", "tp": 2, "sequence_parallel": True, "shape": replace(MIXTURE, has_split_plan=True)},
        ["blocks of columns, then rows", f"{MIXTURE.family} has others", "set `sequence_parallel: false`"],
    ),
    (
        {"engine": "fsdp", "tp": 2, "sequence_parallel": True, "compile": True},
        ["`layout.sequence_parallel` with `engine: fsdp` does not go with `layout.compile`"],
    ),
    (
        {"engine": "fsdp", "cp": 2, "dp_shard": 2, "shape": replace(DENSE, family="lfm2", kinds=(STATEFUL,))},
        ["cp 2", "layers of lfm2 (0) carry a state", "set `dp_shard: 4` and `cp: 1`"],
    ),
]


@pytest.mark.parametrize(("case", "parts"), ILLEGAL)
def test_what_the_engine_cannot_do_is_an_error_that_names_the_factors(case, parts):
    (error, nearest), _ = problems(**case)
    assert [part for part in parts if part not in f"{error}; {nearest}"] == []
    assert nearest.endswith(("the nearest layout that works", "change their number, or the batch"))


def test_for_a_model_that_no_layout_suits_none_is_nearest():
    (error,), _ = problems(shape=replace(MIXTURE, experts_per_token=1), dp_shard=2)
    assert error.endswith("which Megatron-core cannot train; use engine: fsdp")


UNWISE = [
    ({"tp": 16, "shape": replace(DENSE, num_heads=16, num_kv_heads=16)}, ["tp 16", "limit of 8", "one node"]),
    ({"pp": 24, "shape": replace(DENSE, num_layers=24)}, ["pp 24", "limit of 16", "bubble"]),
    ({"cp": 8}, ["cp 8", "limit of 4", "keys and values"]),
    ({"tp": 4, "dp_shard": 2, "nodes": 4}, ["tp 4", "2 processes of a node", "crosses nodes"]),
    ({"pp": 4, "rows": 3}, ["3 micro-batches", "pp 4", "idle for 50% of a step"]),
    ({"pp": 5}, ["12 layers", "pp 5 × vpp 1 = 5", "2, others 3"]),
    ({"tp": 8}, ["tp 8", "4 key/value heads", "by 2 processes"]),
    ({"sequence_parallel": True}, ["sequence_parallel", "tp 1"]),
    ({"engine": "fsdp", "sequence_parallel": True}, ["sequence_parallel", "tp 1"]),
    ({"engine": "fsdp", "cp": 6}, ["cp 6 does not divide the 8 attention heads of a process", "divides them: cp 2"]),
]


@pytest.mark.parametrize(("case", "parts"), UNWISE)
def test_what_is_seldom_wise_is_a_warning_that_says_why(case, parts):
    errors, warnings = problems(**case)
    assert (errors, len(warnings)) == ([], 1)
    assert [part for part in parts if part not in warnings[0]] == []


def test_without_a_model_only_what_needs_none_is_checked():
    constraints = RunConstraints(1, 3, 512, 64)
    assert list(layout_errors("megatron", Layout(tp=3), constraints, {})) == []
    assert len(list(layout_errors("megatron", Layout(tp=3, vpp=2), constraints, {}))) == 1


def test_the_bubble_is_that_of_a_schedule_laid_out_by_hand():
    """The predicted bubble is that of a schedule by hand: 2 stages, 3 micro-batches: 3/4 busy; 4 stages, 1: 1/4."""
    assert bubble_fraction(2, 1, 3) == 1 / 4
    assert bubble_fraction(4, 1, 1) == 3 / 4
    assert bubble_fraction(1, 1, 8) == 0
    assert bubble_fraction(4, 5, 8) == 3 / 43


def test_megatron_on_gpus_needs_transformer_engine_for_experts_and_context_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def errors(torch_type: str, precision: str = "bf16", shape: ModelShape = DENSE, cp: int = 1) -> list[str]:
        rules = RULES["megatron"]
        return list(rules.device_errors(torch_type, Layout(cp=cp), precision, shape))

    assert errors("cuda") == errors("cpu", shape=MIXTURE, cp=2) == []
    for_cp, for_experts = errors("cuda", shape=MIXTURE, cp=2)
    assert "cp 2 on GPUs needs Transformer Engine, which is not installed here" in for_cp and "set cp 1" in for_cp
    assert "qwen3_moe on GPUs needs Transformer Engine" in for_experts
    assert "6 experts are computed one by one" in for_experts
    file = re.search(r"pip install --no-build-isolation -r (\S+)\)", for_experts)[1]
    assert "transformer-engine" in (ROOT / file).read_text()

    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert errors("cuda", shape=MIXTURE, cp=2) == errors("cuda", "fp8", MIXTURE, 2) == []
    assert "does not compute in fp32" in errors("cuda", "fp32", cp=2)[0]
    assert list(RULES["fsdp"].device_errors("cuda", Layout(), "bf16", MIXTURE)) == []
