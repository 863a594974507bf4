"""Each layout that cannot work is refused in a sentence, with the nearest layout that works."""

import json
import re
import time
from dataclasses import replace

import pytest

from flows.planning.layout_advice import explained
from flows.planning.layout_text import engine_and_fields
from stages.core.errors import LayoutError
from stages.models.known_models import KNOWN
from stages.parallel.layout import Layout, RunConstraints
from stages.parallel.legality import refusals
from stages.planner.adapted import PlannedAdapter
from stages.planner.costs import SearchRequest
from stages.planner.hardware import HARDWARE
from stages.planner.workload import RowMedia, StateBytes, Workload

H100, WORK = HARDWARE["h100-80gb"], Workload(4096, 96)
DENSE, MIXTURE = KNOWN["qwen2.5 7b"], KNOWN["qwen3 30b"]  # 28 heads of 4 keys; 128 experts
UNPLANNED, WRONG = replace(DENSE, has_split_plan=False, family="lfm2"), replace(DENSE, split_flaw="a sum is lost")
IN_ROWS = replace(DENSE, packs=False)
NF4, EVA, EXPERTS = (
    replace(WORK, adapter=PlannedAdapter(8, **options))
    for options in (
        {"target_modules": ("q_proj",), "base_precision": "nf4"},
        {"init": "eva"},
        {"target_parameters": ("mlp.experts.gate_up_proj",)},
    )
)
FP8, AHEAD = replace(WORK, precision="fp8"), replace(WORK, predicts_ahead=True)
SCORES, SEES = replace(WORK, scores_documents=True), replace(WORK, media=(RowMedia(100, 100.0),))
MUON, ROUNDS = replace(WORK, optimizer="muon"), replace(WORK, state_bytes=StateBytes(2, 4))
UNPACKED = replace(WORK, packs=False)
REFUSED = [
    # degrees that do not divide heads, experts, the vocabulary, the batch or each other
    (DENSE, WORK, 8, "fsdp tp=8"),
    (DENSE, WORK, 6, "fsdp tp=3 dp_shard=2"),
    (DENSE, WORK, 6, "fsdp tp=6"),
    (DENSE, WORK, 16, "fsdp tp=16"),
    (DENSE, WORK, 16, "fsdp tp=8 cp=2"),
    (replace(DENSE, vocab_size=50257), WORK, 4, "fsdp tp=2 dp_shard=2"),
    (replace(DENSE, vocab_size=50257), WORK, 8, "fsdp tp=2 cp=2 dp_shard=2"),
    (MIXTURE, WORK, 12, "fsdp dp_shard=12 ep=12"),
    (MIXTURE, WORK, 6, "fsdp dp_shard=6 ep=3"),
    (MIXTURE, WORK, 8, "fsdp dp_shard=4 dp_replicate=2 ep=8"),
    (MIXTURE, WORK, 8, "fsdp dp_shard=2 tp=4 ep=4"),
    (MIXTURE, WORK, 8, "fsdp tp=8 ep=2"),
    (DENSE, WORK, 8, "fsdp dp_shard=8 micro_batch_size=5"),
    (DENSE, WORK, 8, "fsdp dp_shard=8 micro_batch_size=24"),
    (DENSE, replace(WORK, global_batch_size=4), 8, "fsdp dp_shard=4 cp=2 micro_batch_size=2"),
    (DENSE, replace(WORK, sequence_length=4), 8, "fsdp cp=8"),
    # models without experts, without a plan or a right one, with rows of their own
    (DENSE, WORK, 4, "fsdp dp_shard=4 ep=2"),
    (DENSE, WORK, 8, "fsdp dp_shard=2 cp=2 tp=2 ep=4"),
    (UNPLANNED, WORK, 2, "fsdp tp=2"),
    (UNPLANNED, WORK, 8, "fsdp tp=2 cp=2 dp_shard=2"),
    (WRONG, WORK, 4, "fsdp tp=2 dp_shard=2"),
    (IN_ROWS, WORK, 4, "fsdp cp=2 dp_shard=2"),
    (IN_ROWS, WORK, 8, "fsdp cp=4 tp=2"),
    (MIXTURE, WORK, 4, "fsdp tp=2 dp_shard=2 sequence_parallel=true"),
    # options that do not go with a degree, or with a choice
    *((DENSE, work, 4, f"fsdp {degree}=2 dp_shard=2") for work in (FP8, AHEAD, SCORES) for degree in ("tp", "cp")),
    *((MIXTURE, work, 4, "fsdp dp_shard=4 ep=4") for work in (FP8, AHEAD, SCORES, EXPERTS)),
    (DENSE, NF4, 4, "fsdp tp=2 cp=2"),
    (DENSE, EVA, 4, "fsdp tp=4"),
    (DENSE, SEES, 4, "fsdp tp=2 cp=2"),
    (MIXTURE, WORK, 4, "fsdp dp_shard=4 ep=2 compile=true"),
    (DENSE, MUON, 4, "fsdp dp_shard=4 cpu_offload=true"),
    (DENSE, ROUNDS, 4, 'fsdp dp_shard=4 accumulate="sharded"'),
    (DENSE, UNPACKED, 4, "fsdp dp_shard=4 compile=true"),
    # fields of the other engine, and what an engine cannot do
    (DENSE, WORK, 4, "fsdp pp=2 dp_shard=2"),
    (DENSE, WORK, 8, "fsdp pp=2 vpp=2 tp=2 dp_shard=2"),
    (MIXTURE, WORK, 4, "fsdp dp_shard=4 etp=2"),
    (DENSE, WORK, 4, "megatron dp_shard=4 compile=true cpu_offload=true"),
    (DENSE, WORK, 4, "megatron dp_shard=4 recompute=offload"),
    (DENSE, WORK, 8, "megatron tp=8"),
    (DENSE, WORK, 8, "megatron pp=8 vpp=8"),
    (DENSE, WORK, 8, "megatron vpp=2 dp_shard=8"),
    (DENSE, replace(WORK, sequence_length=4095), 4, "megatron cp=2 dp_shard=2"),
    (MIXTURE, WORK, 8, "megatron tp=2 dp_shard=4"),
    (MIXTURE, WORK, 12, "megatron dp_shard=12 ep=12"),
    (MIXTURE, WORK, 8, "megatron dp_shard=8 etp=16"),
    (DENSE, WORK, 8, "megatron dp_shard=8 ep=2"),
]


@pytest.mark.parametrize(("shape", "work", "gpus", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_a_layout_that_cannot_work_is_refused_with_the_nearest_that_does(shape, work, gpus, text):
    request = SearchRequest(shape, work, H100, gpus)
    with pytest.raises(LayoutError) as refused:
        explained(request, text)
    title, *reasons, nearest = str(refused.value).splitlines()
    assert title == f"the layout {text!r} cannot work:"
    assert 1 <= len(reasons) <= 2 and all(len(one) < 400 for one in reasons)
    assert nearest.endswith(", the nearest layout that works")
    engine, fields = engine_and_fields(text)
    changed = {name: json.loads(value) for name, value in re.findall(r"`(\w+): ([^`]+)`", nearest)}
    better = " ".join(f"{name}={json.dumps(value)}" for name, value in {**fields, **changed}.items())
    assert explained(request, f"{engine} {better}").candidate.layout.world_size == gpus


def test_where_no_smaller_degrees_help_that_is_said():
    (reason, advice) = refusals("fsdp", Layout(dp_shard=7), RunConstraints(1, 7, 512, 8), {})
    assert "global_batch_size 8 is not divisible" in reason and advice.startswith("no smaller degrees make 7 processes")


@pytest.mark.parametrize("name", ["dp_shard", "tp", "cp", "ep", "pp", "vpp", "etp", "micro_batch_size"])
def test_absurd_degrees_are_refused_at_once(name):
    started_s = time.process_time()
    layout = Layout(**{"dp_shard": 12, "tp": 12, "ep": 12, name: 10**12})
    for processes in (24, layout.world_size):
        assert refusals("fsdp", layout, RunConstraints(1, processes, 512, 8), {})
    assert time.process_time() - started_s < 2
