"""Whatever is searched, each layout that is found works, divides the model, fits, and none that fits is faster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core.errors import LayoutError
from stages.models.shape import ModelShape
from stages.parallel.legality import is_legal
from stages.planner.adapted import PlannedAdapter
from stages.planner.costs import SearchRequest
from stages.planner.hardware import HARDWARE
from stages.planner.search import estimate, legal_layouts, search
from stages.planner.workload import StateBytes, Workload

ADAPTERS = (
    None,
    PlannedAdapter(8),
    PlannedAdapter(8, ("q_proj",)),
    PlannedAdapter(8, base_precision="nf4"),
    PlannedAdapter(8, init="eva"),
    PlannedAdapter(8, use_dora=True),
)


@st.composite
def shapes(draw):
    kv_heads = draw(st.sampled_from((1, 2, 3, 4, 8)))
    experts = draw(st.sampled_from((0, 0, 4, 6, 64)))
    return ModelShape(
        num_layers=draw(st.sampled_from((2, 6, 24))),
        hidden_size=draw(st.sampled_from((256, 4096, 12288))),
        num_heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        num_kv_heads=kv_heads,
        head_dim=64,
        ffn_size=draw(st.sampled_from((768, 11008))),
        vocab_size=draw(st.sampled_from((1000, 32000, 50257))),
        family="qwen3_moe" if experts else "llama",
        tied_embeddings=draw(st.booleans()),
        has_split_plan=draw(st.sampled_from((True, True, False))),
        num_experts=experts,
        experts_per_token=min(2, experts),
        expert_ffn_size=768 if experts else 0,
    )


@st.composite
def requests(draw):
    adapter = draw(st.sampled_from(ADAPTERS))
    workload = Workload(
        draw(st.sampled_from((512, 3000, 32768))),
        draw(st.sampled_from((1, 2, 6, 16, 48))),
        draw(st.sampled_from(("bf16", "bf16", "fp32", "fp8"))),
        scores_documents=adapter is None and draw(st.integers(0, 7)) == 0,
        predicts_ahead=adapter is None and draw(st.integers(0, 7)) == 0,
        adapter=adapter,
        optimizer=draw(st.sampled_from(("adamw", "adamw", "muon"))),
        state_bytes=draw(st.sampled_from((StateBytes(), StateBytes(2, 4)))),
        packs=(packs := draw(st.integers(0, 3)) > 0),
        even_rows=packs,
    )
    hardware = HARDWARE[draw(st.sampled_from(("a100-80gb", "l4", "h200")))]
    return SearchRequest(draw(shapes()), workload, hardware, draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12))))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(requests())
def test_what_is_found_works_fits_and_is_the_fastest(request):
    try:
        result = search(request)
    except LayoutError:
        assert not [*legal_layouts(request)]
        return
    shape, workload, features = request.shape, request.workload, request.workload.features(request.shape)
    for one in (*result.fitting, *result.too_large):
        layout = one.layout
        assert is_legal(one.engine, layout, request.constraints, shape, features)
        assert layout.world_size == request.num_gpus
        assert workload.global_batch_size % (layout.micro_batch_size * layout.data_parallel_size) == 0
        assert shape.num_heads % layout.tp == 0 and (shape.num_experts or layout.ep) % layout.ep == 0
        assert layout.cp <= workload.sequence_length
        needed = max(one.memory.peak_gib / request.memory_gib, one.memory.host_gib / request.host_gib)
        assert (needed <= 1) == (one in result.fitting)
    times = [one.time.mean_step_s for one in result.fitting]
    assert times == sorted(times)
    every = [estimate(request, engine, layout) for engine, layout in legal_layouts(request)]
    fits = [one.time.mean_step_s for one in every if one.fits]
    tight = [
        one.time.mean_step_s for one in every if one.memory_fit == "tight" and one.memory.peak_gib <= request.memory_gib
    ]
    assert (result.best is None) == (not fits and not tight)
    if result.best:
        assert result.best.time.mean_step_s == pytest.approx(min(fits or tight))
