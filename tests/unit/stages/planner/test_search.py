"""The search for a parallel layout ranks only legal layouts, with the best first, and is fast."""

import cProfile
from dataclasses import replace

import pytest

from stages.core.errors import LayoutError
from stages.models.known_models import KNOWN
from stages.models.tower import Tower, TowerBytes
from stages.parallel.layout import Layout
from stages.parallel.legality import is_legal
from stages.planner.adapted import PlannedAdapter
from stages.planner.compilation import not_compiled
from stages.planner.costs import SearchRequest
from stages.planner.explain import near_misses, planned_media, what_limits
from stages.planner.hardware import HARDWARE, cpu_of
from stages.planner.search import estimate, fitting_layouts, legal_layouts, search
from stages.planner.workload import RowMedia, Workload

A100 = HARDWARE["a100-80gb"]
FEW = SearchRequest(KNOWN["qwen2.5 7b"], Workload(2048, 16), A100, 4, available_gib=70.0)
SMALL = SearchRequest(KNOWN["qwen2.5 7b"], Workload(2048, 64), A100, 8)


@pytest.fixture(scope="module")
def found():
    return search(SMALL)


def test_all_ranked_are_legal_and_in_order(found):
    result = found
    assert all(is_legal(one.engine, one.layout, SMALL.constraints, SMALL.shape, {}) for one in result.fitting)
    times = [one.time.mean_step_s for one in result.fitting]
    assert times == sorted(times)
    assert all(one.memory.peak_gib <= A100.memory_gib for one in result.fitting)


def test_the_best_is_that_of_estimating_every_layout():
    every = [estimate(FEW, engine, layout) for engine, layout in legal_layouts(FEW)]
    fastest = min((one for one in every if one.fits), key=lambda one: one.time.mean_step_s)
    assert search(FEW).best.time.mean_step_s == pytest.approx(fastest.time.mean_step_s)


def test_what_fits_for_sure_comes_before_what_is_tight():
    result = search(FEW)
    best, fastest = result.best, result.fitting[0]
    assert (best.memory_fit, fastest.memory_fit) == ("fits", "tight")
    assert best.memory.peak_gib <= 0.9 * FEW.memory_gib < fastest.memory.peak_gib <= FEW.memory_gib
    safest = fitting_layouts(FEW)
    assert safest[0] == best and set(safest) == set(result.fitting)
    fits = [one.fits for one in safest]
    assert fits == sorted(fits, reverse=True)
    assert any(line.startswith(f"{fastest.text}, would be") and "is tight" in line for line in near_misses(result))


def test_a_mixture_of_experts_spreads_them():
    result = search(SearchRequest(KNOWN["qwen3 30b"], Workload(4096, 16), A100, 8))
    assert result.best.layout.ep > 1


def test_reasons_name_the_memory_that_lacks_and_the_time_that_is_lost(found):
    sentences = near_misses(found)
    assert any("GiB are free" in sentence for sentence in sentences)
    assert any("slower:" in sentence for sentence in sentences)
    assert "compute" in what_limits(found.best)


def test_where_nothing_fits_the_nearest_are_named():
    small = replace(HARDWARE["a100-40gb"], host_memory_gib=1024.0)
    result = search(SearchRequest(KNOWN["llama3 405b"], Workload(4096, 64), small, 8))
    assert result.best is None
    needed = [max(one.memory.peak_gib / 39.4, one.memory.host_gib / 128) for one in result.too_large]
    assert needed == sorted(needed) and min(needed) > 1
    sentences = near_misses(result)
    assert sentences
    assert all("lacks" in sentence for sentence in sentences)


def test_layers_are_compiled_where_it_pays_within_the_training():
    """A compiled layer launches fewer kernels that move fewer bytes; compiling takes 40 s once, or 0.04 s a step."""
    request = replace(SMALL, engines=("fsdp",))
    best = search(request).best
    assert best.layout.compile and best.time.compilation_s == pytest.approx(0.04)
    eager = estimate(request, "fsdp", best.layout.model_copy(update={"compile": False}))
    assert best.time.step_time_s < 0.9 * eager.time.step_time_s
    short = replace(SMALL.workload, total_tokens=5 * SMALL.workload.tokens_per_step)
    assert not search(replace(request, workload=short)).best.layout.compile


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": KNOWN["qwen3 30b"]}, "no single graph of a layer with experts"),
        ({"workload": replace(SMALL.workload, even_rows=False)}, "rows differ in length"),
        ({"workload": replace(SMALL.workload, media=(RowMedia(100, 50.0, 10.0),))}, "that see were not"),
        ({"hardware": HARDWARE["ascend910b2"]}, "makes no kernels for ascend910b2"),
        ({"hardware": cpu_of(2)}, "no faster on a CPU"),
        ({"no_compiler": "there is no gcc"}, "there is no gcc"),
    ],
)
def test_layers_are_not_compiled_where_that_cannot_work_and_the_reason_is_given(changes, why):
    request = replace(SMALL, **changes)
    assert not_compiled(SMALL) is None and why in not_compiled(request)
    assert not any(layout.compile for _, layout in legal_layouts(request))


def test_where_no_engine_can_do_the_work_the_reasons_are_given():
    muon = replace(SMALL.workload, optimizer="muon", adapter=PlannedAdapter(8))
    with pytest.raises(LayoutError) as refused:
        search(replace(SMALL, workload=muon))
    assert str(refused.value) == (
        "looking for a layout: `optimizer.name: muon` does not go with `adapter`, whose factors are no whole matrices "
        "to orthogonalise; change either; `optimizer.name: muon` needs `engine: fsdp`, found megatron; change either"
    )


def test_layouts_that_cannot_replay_experts_are_not_searched():
    request = SearchRequest(KNOWN["qwen3 30b"], Workload(4096, 16), A100, 8, ("megatron",))
    replayed = replace(request, workload=replace(request.workload, replays_experts=True))

    def suits(layout):
        return layout.cp == 1 and not layout.sequence_parallel and not (layout.pp > 1 and layout.recomputes)

    every, found = ([layout for _, layout in legal_layouts(one)] for one in (request, replayed))
    assert found == [layout for layout in every if suits(layout)] != every
    assert found


def test_rows_with_pictures_take_the_towers_time_and_memory():
    kept = TowerBytes(layers=27 * 32 * 2 * 1280.0, inputs=2 * 32 * 1280.0, results=1e5, outside=2e4, projector=1e4)
    tower = Tower(
        "vision_tower",
        32,
        630_000_000,
        632_000_000,
        45_000_000,
        680_000_000,
        6.3e8,
        1.1e7,
        1e5,
        1176.0,
        1564.0,
        kept,
        kept,
    )
    text = replace(SMALL, shape=replace(SMALL.shape, towers=(tower,)))
    seeing = replace(text, workload=replace(SMALL.workload, media=(RowMedia(2 * 1564, 1564.0),)))
    before, found = (estimate(one, "fsdp", Layout(dp_shard=8, accumulate="sharded")) for one in (text, seeing))
    assert before.time.parts.tower == 0 < found.time.parts.tower
    flops = seeing.shape.flops().training([2048], 2048) + tower.flops().training([1564])
    assert found.time.mfu == pytest.approx(64 * flops / found.time.step_time_s / 8 / A100.peak_flops_per_s("bf16"))
    (shown,) = planned_media(seeing.shape, seeing.workload, found.layout)
    assert shown.per_row == 1
    assert shown.flops_share == pytest.approx(tower.flops().training([1564]) / flops)
    assert found.memory.peak_gib - before.memory.peak_gib > 0.9 * shown.memory_gib
    assert planned_media(text.shape, text.workload, before.layout) == []
    # Frozen, it has no backward pass and keeps nothing.
    frozen = replace(seeing, workload=replace(seeing.workload, frozen=("vision_tower", "projector")))
    cheaper = estimate(frozen, "fsdp", Layout(dp_shard=8, accumulate="sharded"))
    assert cheaper.time.parts.tower < 0.4 * found.time.parts.tower
    assert cheaper.memory.peak_gib < found.memory.peak_gib
    # Matrices of text may be split, and towers stay whole; documents with media are not shared.
    layouts = [layout for _, layout in legal_layouts(seeing)]
    assert {layout.tp for layout in layouts} == {1, 2, 4} and {layout.cp for layout in layouts} == {1}
    alone = replace(seeing, workload=replace(seeing.workload, frozen=("language_model",)))
    learning = [estimate(alone, "fsdp", Layout(dp_shard=8 // tp, tp=tp)).memory.worst.optimizer for tp in (1, 2, 4)]
    assert learning == pytest.approx([learning[0] * tp for tp in (1, 2, 4)])
    # The other engine builds the text part alone.
    assert {engine for engine, _ in legal_layouts(seeing)} == {"fsdp"} < {engine for engine, _ in legal_layouts(text)}


def test_what_the_host_has_no_memory_for_does_not_fit():
    """Model states of 405B take 6 TiB of host memory, of which a node has two; without that, they would be tight."""
    h100 = HARDWARE["h100-80gb"]
    request = SearchRequest(KNOWN["llama3 405b"], Workload(4096, 64), h100, 8, engines=("fsdp",))
    result = search(request)
    assert result.best is None
    assert any("lacks host memory: 756.0 of 256.0 GiB" in one for one in near_misses(result))
    unknown = search(replace(request, hardware=replace(h100, host_memory_gib=None)))
    assert unknown.best and unknown.best.layout.cpu_offload
    assert "756.0 GiB of the host's memory are needed" in what_limits(unknown.best)


def test_gradients_are_added_up_sharded_only_where_whole_ones_do_not_fit():
    layout = Layout(dp_shard=64, recompute="full")
    large = SearchRequest(KNOWN["llama3 70b"], Workload(8192, 512), HARDWARE["h100-80gb"], 64, engines=("fsdp",))
    sharded, whole = estimate(large, "fsdp", layout), estimate(large, "fsdp", with_accumulate(layout, "whole"))
    assert (sharded.layout.accumulate, sharded.memory_fit) == ("sharded", "fits")
    assert whole.memory_fit == "does not fit"
    assert whole.memory.peak_gib - sharded.memory.peak_gib > 4 * 70e9 / 2**30
    small = replace(large, shape=KNOWN["llama3 8b"])
    assert estimate(small, "fsdp", layout).layout.accumulate == "auto"
    reduced_often = estimate(small, "fsdp", with_accumulate(layout, "sharded"))
    assert reduced_often.time.step_time_s > estimate(small, "fsdp", layout).time.step_time_s
    assert "fsdp" in {one.engine for one in search(large).fitting}


def with_accumulate(layout, how):
    return layout.model_copy(update={"accumulate": how})


def test_a_count_without_a_legal_layout_names_the_nearest_that_has_one():
    with pytest.raises(LayoutError, match=r"7 GPUs.*nearest number that has one: 8"):
        search(SearchRequest(KNOWN["qwen2.5 7b"], Workload(2048, 8), A100, 7, engines=("fsdp",)))


def test_seventy_billion_parameters_on_a_thousand_devices_take_two_million_calls():
    """A search takes below two seconds of work, counted in function calls, which do not depend on the machine."""
    profile = cProfile.Profile()
    request = SearchRequest(KNOWN["llama3 70b"], Workload(4096, 1024), HARDWARE["h100-80gb"], 1024)
    result = profile.runcall(search, request)
    assert result.best is not None
    assert sum(function.callcount for function in profile.getstats()) < 2_400_000


def test_long_rows_are_shared_by_tokens_and_matrices_where_the_engine_can():
    h100 = HARDWARE["h100-80gb"]
    long = SearchRequest(KNOWN["llama3 8b"], Workload(65536, 8), h100, 8, engines=("fsdp",))
    assert search(long).best.layout.cp > 1
    degrees = {(layout.tp, layout.cp) for _, layout in legal_layouts(long)}
    assert degrees == {(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8}
    shorter = replace(long, workload=Workload(2048, 8))
    assert {layout.cp for _, layout in legal_layouts(shorter)} == {1, 2}
    adapted, quantized, measured = (
        replace(long, workload=replace(long.workload, adapter=PlannedAdapter(8, **options)))
        for options in ({}, {"base_precision": "nf4"}, {"init": "eva"})
    )
    assert {(layout.tp, layout.cp) for _, layout in legal_layouts(adapted)} == degrees
    unplanned = replace(long, shape=replace(long.shape, has_split_plan=False))
    for request in (quantized, measured, unplanned):
        assert {layout.tp for _, layout in legal_layouts(request)} == {1}
    scored = replace(long, workload=replace(long.workload, scores_documents=True))
    assert {(layout.tp, layout.cp) for _, layout in legal_layouts(scored)} == {(1, 1)}
    for options in ({"compile": True}, {"cpu_offload": True}):
        tried = (one for _, one in legal_layouts(long) if options.items() <= one.model_dump().items())
        assert {(layout.tp, layout.cp) for layout in tried} == degrees


@pytest.mark.parametrize("degrees", [{"dp_shard": 4}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}])
def test_each_rank_copies_its_share_of_the_weights_from_the_host(degrees):
    seconds = [
        estimate(FEW, "fsdp", Layout(**degrees, accumulate="sharded", cpu_offload=offloads)).time.parts.data_parallel
        for offloads in (False, True)
    ]
    micro_batches = FEW.workload.global_batch_size / degrees["dp_shard"]
    share = FEW.shape.num_parameters / 4
    # There for each forward and backward pass in fp32; once a step a gradient back.
    copied_s = (2 * micro_batches + 1) * 4 * share / (A100.host_gb_per_s * 1e9)
    assert seconds[1] - seconds[0] == pytest.approx(copied_s, rel=0.01)


def test_experts_are_spread_where_the_engine_can():
    mixture = SearchRequest(KNOWN["qwen3 30b"], Workload(4096, 64), A100, 16, engines=("fsdp",))
    assert {layout.ep for _, layout in legal_layouts(mixture)} == {1, 2, 4, 8}
    assert not any(layout.compile for _, layout in legal_layouts(mixture))
    sharded = Layout(dp_shard=16, recompute="full", accumulate="sharded")
    layouts = sharded.model_copy(update={"ep": 8}), sharded
    spread, whole = (estimate(mixture, "fsdp", layout) for layout in layouts)
    assert spread.memory.peak_gib < whole.memory.peak_gib
    assert spread.time.parts.expert_parallel > 0 == whole.time.parts.expert_parallel
    of_experts = PlannedAdapter(8, target_parameters=("mlp.experts.gate_up_proj",))
    for adapter, degrees in ((of_experts, {1}), (PlannedAdapter(8, ("q_proj",)), {1, 2, 4, 8})):
        adapted = replace(mixture, workload=replace(mixture.workload, adapter=adapter))
        assert {layout.ep for _, layout in legal_layouts(adapted)} == degrees


def test_with_less_room_another_is_the_best(found):
    best = found.best
    tight = SearchRequest(SMALL.shape, SMALL.workload, A100, 8, available_gib=best.memory.peak_gib - 0.01)
    assert search(tight).best.layout != best.layout


def test_estimate_takes_a_layout_as_given():
    layout = Layout(tp=4, pp=2, sequence_parallel=True)
    assert estimate(SMALL, "megatron", layout).layout == layout
