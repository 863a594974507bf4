"""Predicted step times behave plausibly for any constants of the planner: unaligned matrices are slower, say."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stages.engines import log_probabilities
from stages.models.known_models import KNOWN
from stages.models.layer_kinds import KeptBytes, LayerKind
from stages.parallel.layout import Layout
from stages.planner import compute, network
from stages.planner.activations import kept_bytes_per_token
from stages.planner.adapted import PlannedAdapter
from stages.planner.compute import LayerWork, head_time, layer_time, matmul_s, memory_rate
from stages.planner.costs import StepCase, TimedCase
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import HARDWARE
from stages.planner.memory import GIB, memory
from stages.planner.partition import pipeline_stages
from stages.planner.time import step_time, step_traffic
from stages.planner.workload import ExtraPasses, Workload

MEGATRON = COSTS["megatron"].software
H100 = HARDWARE["h100-80gb"]
LLAMA = KNOWN["llama3 8b"]
WORK = Workload(sequence_length=4096, global_batch_size=64)
LLAMA_WORK = LayerWork(LLAMA, 1, 4096, "bf16")


def estimate(layout, work=WORK, engine="megatron", hardware=H100):
    return step_time(LLAMA, engine, layout, work, hardware)


def test_parts_make_up_the_step_and_rates_follow_from_it():
    found = estimate(Layout(dp_shard=2, tp=2, pp=2))
    assert sum(vars(found.parts).values()) == pytest.approx(found.step_time_s)
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / found.step_time_s / 8)
    flops = LLAMA.flops().training([4096], 4096) * 64
    assert found.mfu == pytest.approx(flops / found.step_time_s / 8 / 989e12)


def test_one_device_has_no_communication_and_no_bubble():
    parts = estimate(Layout()).parts
    others = {
        name: seconds for name, seconds in vars(parts).items() if seconds and name not in ("compute", "optimizer")
    }
    assert others == {}


@pytest.mark.parametrize(("pp", "vpp", "rows"), [(2, 1, 8), (4, 1, 16), (4, 2, 16), (8, 4, 32)])
def test_bubble_is_that_of_equally_fast_stages(pp, vpp, rows):
    """The bubble of equally fast stages is (p - 1) / (v m) of the ideal time (Narayanan et al. 2021, 2.2)."""
    work = replace(WORK, global_batch_size=rows)
    parts, alone = estimate(Layout(pp=pp, vpp=vpp), work).parts, estimate(Layout(), work).parts
    assert parts.bubble == pytest.approx((pp - 1) / (vpp * rows) * alone.compute / pp)


def test_full_recomputation_adds_the_forward_pass_and_nothing_else():
    without, with_it = estimate(Layout()).parts, estimate(Layout(recompute="full")).parts
    assert with_it.compute == without.compute
    assert 0.25 < with_it.recompute / with_it.compute < 0.4  # a forward pass is a third of both


def test_no_matrix_product_is_faster_than_the_device():
    for hardware in HARDWARE.values():
        for size in (64, 1024, 16384):
            peak = hardware.peak_flops_per_s("bf16")
            assert matmul_s(hardware, "bf16", size, size, size) > 2 * size**3 / peak


def test_unaligned_matrices_are_slower():
    assert matmul_s(H100, "bf16", 4096, 4096, 4095) > 2 * matmul_s(H100, "bf16", 4096, 4096, 4096)


def test_communication_within_a_node_is_faster_than_between_nodes():
    num_bytes = 1e9
    inside = network.gather_s(H100, network.Group(8, 1), num_bytes)
    across = network.gather_s(H100, network.Group(8, 8), num_bytes)
    assert across > 5 * inside
    assert network.gather_s(H100, network.Group(1, 1), num_bytes) == 0


def test_a_group_of_whole_nodes_uses_all_network_cards():
    one_card = network.gather_s(H100, network.Group(2, 8), 1e9)
    eight_cards = network.gather_s(H100, network.Group(16, 1), 1e9)
    assert eight_cards < one_card


def test_pipeline_messages_cost_by_where_the_next_stage_is_and_small_ones_more_a_byte():
    nodes = replace(H100, gpus_per_node=4)
    inside, across = (estimate(Layout(tp=4, pp=2), hardware=hardware).parts for hardware in (H100, nodes))
    assert across.pipeline_messages > 2 * inside.pipeline_messages > 0
    small, large = (network.neighbour_s(H100, 8, num_bytes) / num_bytes for num_bytes in (1e4, 1e8))
    assert small > 10 * large


def test_reducing_gradients_hides_behind_no_more_than_the_passes_there_are():
    def exposed_and_alone_s(gb_per_s):
        hardware = replace(H100, inter_node_gb_per_s=gb_per_s)
        alone = replace(hardware, software=(("overlaps_gradients", False),))
        return [estimate(Layout(dp_shard=64), hardware=one).parts.data_parallel for one in (hardware, alone)]

    quick, slow, slower = (exposed_and_alone_s(gb_per_s) for gb_per_s in (50, 0.1, 0.05))
    overlapped = H100.efficiency.overlapped
    assert quick[0] == pytest.approx((1 - overlapped) * quick[1])  # hidden, but for what it takes from compute
    assert slow[1] - slow[0] == pytest.approx(slower[1] - slower[0])
    compute = estimate(Layout(dp_shard=64)).parts.compute  # of one micro-batch, with the head
    assert 0.8 * overlapped * compute < slow[1] - slow[0] < overlapped * compute


def test_tensor_parallelism_across_nodes_is_slow():
    two_a_node = replace(H100, gpus_per_node=2)
    inside, across = estimate(Layout(tp=8)).parts, estimate(Layout(tp=8), hardware=two_a_node).parts
    assert across.tensor_parallel > 3 * inside.tensor_parallel
    assert across.compute == inside.compute


def test_keeping_gathered_parameters_saves_communication():
    kept = estimate(Layout(dp_shard=64, reshard_after_forward=False), engine="fsdp")
    assert kept.parts.data_parallel < estimate(Layout(dp_shard=64), engine="fsdp").parts.data_parallel


def test_experts_products_run_at_their_own_rate():
    mixture, hardware = KNOWN["qwen3 30b"], replace(H100, efficiency=replace(H100.efficiency, grouped=0.31))
    slow, usual = (layer_time(LayerWork(mixture, 4, 4096, "bf16"), MEGATRON, one).products for one in (hardware, H100))
    dense, same = (layer_time(LayerWork(LLAMA, 4, 4096, "bf16"), MEGATRON, one).products for one in (hardware, H100))
    assert 1.3 < slow.forward_s / usual.forward_s < 2 and dense == same


def test_products_in_eight_bits_sustain_a_share_of_their_own():
    """The planner has a share of peak for each precision; a B200's bf16 products reach 0.46 to 0.49."""
    b200 = HARDWARE["b200"]
    assert b200.sustained_flops_per_s("bf16") == pytest.approx(0.6 * 2250e12)
    assert b200.sustained_flops_per_s("fp8") == pytest.approx(0.72 * 4500e12)
    assert H100.sustained_flops_per_s("fp8") == 0.75 * 1979e12
    reached = 2 * 16384**3 / matmul_s(b200, "bf16", 16384, 16384, 16384) / 2250e12
    assert 0.45 < reached < 0.49


def test_passes_of_each_step_take_a_forward_pass_over_its_rows():
    """A method's extra forward passes cost a forward pass over the step's rows.

    Without a pipeline, such a pass costs as much as full recomputation, plus the output head.
    """
    for engine, layout in (("megatron", Layout(dp_shard=8)), ("fsdp", Layout(dp_shard=8))):
        plain, twice = (estimate(layout, replace(WORK, passes=ExtraPasses(each_step=n)), engine) for n in (0, 2))
        recomputed = estimate(layout.model_copy(update={"recompute": "full"}), engine=engine).parts.recompute
        assert plain.parts.method_passes == 0
        assert twice.step_time_s == pytest.approx(plain.step_time_s + twice.parts.method_passes)
        assert 2 * recomputed < twice.parts.method_passes < 2.5 * recomputed


def test_a_head_of_scores_has_neither_logits_nor_their_product():
    scores = replace(WORK, scores_documents=True)
    worst, whole = (memory(LLAMA, "fsdp", Layout(dp_shard=8), work).worst for work in (scores, WORK))
    assert worst.logits == 0 < whole.logits
    assert whole.weights - worst.weights == pytest.approx(4 * LLAMA.head_parameters / 8 / GIB)
    layers, all_of_it = (estimate(Layout(), work, "fsdp").parts.compute for work in (scores, WORK))
    assert layers == pytest.approx(
        all_of_it - 64 * sum(vars(head_time(LLAMA_WORK, COSTS["fsdp"].software, H100)).values())
    )


def test_a_head_in_chunks_computes_its_product_again_as_the_engines_do(monkeypatch):
    """Torch counts the FLOPs of the engines' own head: three products, and one more if its logits were in chunks."""
    tokens, entries, width = 64, 256, 8
    hidden, weight = torch.randn(1, tokens, width, requires_grad=True), torch.randn(entries, width, requires_grad=True)
    wanted, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)
    assert compute.LOGITS_CHUNK == log_probabilities.CHUNK_LOGITS
    fast = replace(H100, memory_gb_per_s=1e12)  # only products take time
    for chunk in (tokens * entries, tokens * entries // 4):
        monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk)
        with FlopCounterMode(display=False) as counter:
            log_probabilities.token_log_probabilities(
                hidden, log_probabilities.OutputHead(weight), wanted, positions
            ).sum().backward()
        num_products = counter.get_total_flops() / (2 * tokens * entries * width)
        monkeypatch.setattr(compute, "LOGITS_CHUNK", chunk)
        work = LayerWork(replace(LLAMA, vocab_size=entries, hidden_size=width), 1, tokens, "fp32")
        time = compute.head_time.__wrapped__(work, MEGATRON, fast)
        assert (time.forward_s + time.backward_s) / time.forward_s == pytest.approx(num_products, rel=1e-4)
    assert num_products == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_moves_the_bytes_that_its_operations_read_and_write(dtype):
    tokens, entries = 64, 512
    hidden, weight = (torch.randn(*size, 8, dtype=dtype, requires_grad=True) for size in ((1, tokens), (entries,)))
    moved = [0, 0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            name = func._schema.name
            if not func.is_view and not any(word in name for word in ("mm", "gather", "scatter", "empty")):
                large = [one for one in (*args, output) if isinstance(one, torch.Tensor)]
                moved[torch._C._current_graph_task_id() != -1] += sum(
                    one.nbytes for one in large if one.numel() == tokens * entries
                )
            return output

    wanted, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)
    with Counting():
        head = log_probabilities.OutputHead(weight)
        log_probabilities.token_log_probabilities(hidden, head, wanted, positions).sum().backward()
    counted = tuple(number / (tokens * entries) for number in moved)
    assert counted == compute._bytes_of_a_logit(dtype.itemsize, MEGATRON)


def test_preferences_need_a_forward_pass_for_their_reference():
    plain, preferences = (
        estimate(Layout(dp_shard=8)),
        estimate(Layout(dp_shard=8), replace(WORK, passes=ExtraPasses(before_training=1))),
    )
    assert plain.reference_pass_s == 0
    assert 0.2 < preferences.reference_pass_s / preferences.step_time_s < 0.4


def test_torchao_casts_at_products_alone():
    """With torchao's fp8, activations stay in 16 bits; frozen weights get gradients unless compiled."""
    casts, whole = (replace(COSTS["fsdp"].software, casts_at_products=one) for one in (True, False))
    work = replace(LLAMA_WORK, precision="fp8", is_frozen=True)
    learning = layer_time(replace(work, is_frozen=False), casts, H100).products
    assert layer_time(work, casts, H100).products == learning
    compiled = replace(casts, fused_elementwise=True)
    assert layer_time(work, compiled, H100).products.backward_s == pytest.approx(learning.backward_s / 2)
    mixture = LayerWork(KNOWN["qwen3 30b"], 4, 4096, "fp8")
    assert layer_time(mixture, casts, H100).products.forward_s > layer_time(mixture, whole, H100).products.forward_s
    kept = {
        (software.casts_at_products, one.precision): kept_bytes_per_token(
            StepCase(LLAMA, COSTS["fsdp"], Layout(), one, software)
        )
        for software in (casts, whole)
        for one in (replace(WORK, precision="fp8"), WORK)
    }
    assert kept[True, "fp8"] == kept[True, "bf16"] > kept[False, "fp8"]


def test_eight_bits_are_faster_where_the_device_has_them():
    assert estimate(Layout(), replace(WORK, precision="fp8")).step_time_s < estimate(Layout()).step_time_s
    a100 = HARDWARE["a100-80gb"]
    without = estimate(Layout(), hardware=a100).parts.compute
    assert estimate(Layout(), replace(WORK, precision="fp8"), hardware=a100).parts.compute >= without


def test_tokens_dispatched_to_experts_on_one_node_stay_there():
    inside, across = network.Group(8, 1), network.Group(16, 1)
    assert network.dispatch_s(H100, inside, 1e8, 8) < network.dispatch_s(H100, across, 1e8, 8)


def test_a_processor_that_is_its_own_host_launches_and_computes_one_after_the_other():
    cpu = HARDWARE["cpu"]
    alone = estimate(Layout(), hardware=cpu).parts.compute
    assert alone > estimate(Layout(), hardware=replace(cpu, host_is_device=False)).parts.compute


def test_eager_selective_recomputation_waits_for_python():
    """On an H100 it took as long as full recomputation: 0.497 and 0.495 s a step; its kernels alone 0.441."""
    work = replace(WORK, global_batch_size=2)
    found, full = (estimate(Layout(recompute=one), work, "fsdp") for one in ("selective", "full"))
    assert found.step_time_s == pytest.approx(full.step_time_s, rel=0.05)
    software = replace(COSTS["fsdp"].software, asks_python=False)
    kernels_alone = step_time(LLAMA, "fsdp", Layout(recompute="selective"), work, H100, software=software)
    assert kernels_alone.parts.recompute < 0.5 * found.parts.recompute
    assert not COSTS["fsdp"].program(Layout(recompute="selective", compile=True)).asks_python


def test_compiled_layers_stream_less_through_memory():
    assert estimate(Layout(compile=True), engine="fsdp").step_time_s < estimate(Layout(), engine="fsdp").step_time_s


def test_four_bits_are_quicker_where_a_device_has_them_and_eight_where_not():
    gb300, h100 = HARDWARE["gb300"], HARDWARE["h100-80gb"]
    eight, four = (replace(WORK, precision=precision) for precision in ("fp8", "fp4"))
    assert estimate(Layout(), four, hardware=gb300).step_time_s < estimate(Layout(), eight, hardware=gb300).step_time_s
    assert h100.sustained_flops_per_s("fp4") == h100.sustained_flops_per_s("fp8")


@pytest.mark.parametrize(("sequence_parallel", "share"), [(False, 1), (True, 1 / 8)])
def test_tokens_are_made_eight_bits_wide_before_they_are_gathered(sequence_parallel, share):
    """Under tensor parallelism, a rank casts inputs of attention and MLP to 8 bits before gathering.

    With sequence parallelism, it casts only its share of them; other inputs are sharded in any case.
    """
    work = replace(LLAMA_WORK, tp=8, sequence_parallel=sequence_parallel)
    in_8, in_16 = (
        layer_time(replace(work, precision=precision), MEGATRON, H100).elementwise.forward_s
        for precision in ("fp8", "bf16")
    )
    numbers = 4096 * (2 * share * LLAMA.hidden_size + LLAMA.ffn_size / 8)
    assert in_8 - in_16 == pytest.approx(2.5 * 2 * numbers / memory_rate(H100))


def test_tokens_split_between_blocks_are_gathered_again_for_the_gradients_of_weights():
    """A sum is a scattering and a gathering: without sequence parallelism four of each; an adapter needs no more."""
    whole, split = Layout(tp=8), Layout(tp=8, sequence_parallel=True)
    for work, share in ((WORK, 5 / 4), (replace(WORK, adapter=PlannedAdapter(8)), 1)):
        of_whole, of_split = (estimate(one, work, "fsdp").parts.tensor_parallel for one in (whole, split))
        assert of_split == pytest.approx(share * of_whole)


def test_norms_of_walked_families_compute_their_share_of_the_tokens():
    # As many values between split matrices as elsewhere.
    kept = KeptBytes(8 * 2.0, 0.0, split_trained=4 * 2.0)
    kind = LayerKind(tuple(range(LLAMA.num_layers)), "layers", 0, 1, 0, 0, 0, 1.0, 1.0, (), (), (), kept, kept)
    work = replace(LLAMA_WORK, shape=replace(LLAMA, kinds=(kind,)), tp=4)
    whole, split = (
        layer_time(replace(work, sequence_parallel=one), MEGATRON, H100).elementwise.forward_s for one in (False, True)
    )
    assert split / whole == pytest.approx((1 / 4 + 1 / 4) / (1 + 1 / 4))


def test_attention_in_eight_bits_is_quicker_by_what_its_constant_says():
    in_16 = layer_time(LLAMA_WORK, MEGATRON, H100).attention_core
    in_8 = layer_time(LLAMA_WORK, replace(MEGATRON, fp8_attention=True), H100).attention_core
    assert in_16.forward_s / in_8.forward_s == pytest.approx(H100.efficiency.attention_in_eight_bits)


def test_offloading_to_a_host_on_the_same_module_costs_less():
    links = [estimate(Layout(dp_shard=8, cpu_offload=True), engine="fsdp", hardware=HARDWARE[name]).step_time_s
             for name in ("gb200", "b200")]  # fmt: skip
    assert links[0] < links[1]
    assert HARDWARE["gb200"].host_gb_per_s > 5 * HARDWARE["b200"].host_gb_per_s


def test_copies_of_activations_cost_the_time_that_layers_do_not_take():
    """Over Grace's link they cost nothing; over slow ones, a link of half the bytes a second costs all copies more."""
    layout, slow = Layout(dp_shard=8, recompute="offload"), replace(H100, host_gb_per_s=10)
    links = [slow, replace(slow, host_gb_per_s=5), HARDWARE["gb200"]]
    once_s, twice_s, hidden_s = (estimate(layout, engine="fsdp", hardware=one).parts.offload for one in links)
    layers = LLAMA.num_layers
    of_layer = memory(LLAMA, "fsdp", layout, WORK).host_gib * GIB / (layers - 1)  # the last layer's stay
    micro_batches = WORK.global_batch_size / 8
    assert twice_s - once_s == pytest.approx(2 * of_layer * layers * micro_batches / (10 * 1e9))
    assert once_s > 0 and hidden_s == 0


def test_a_mixture_s_dense_layers_cost_where_they_lie():
    """Dense layers of a mixture cost memory and time only on their pipeline stage, here all on the first."""
    mixture = replace(KNOWN["qwen3 30b"], num_layers=8, dense_layers=frozenset({0, 1, 2}))
    routed = replace(mixture, dense_layers=frozenset())
    work, layout = replace(WORK, global_batch_size=8), Layout(pp=2, vpp=1)
    held = [memory(shape, "megatron", layout, work).stages for shape in (mixture, routed)]
    assert held[0][0].weights < held[0][1].weights == pytest.approx(held[1][1].weights)
    slowest = [step_time(shape, "megatron", layout, work, H100).parts.compute for shape in (mixture, routed)]
    assert slowest[0] == pytest.approx(slowest[1])


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 8, "ep": 4},
        {"dp_shard": 8, "ep": 8},
        {"dp_shard": 4, "tp": 2, "ep": 2},
        {"dp_shard": 4, "dp_replicate": 2, "ep": 4, "accumulate": "sharded"},
        {"dp_shard": 4, "dp_replicate": 2},
    ],
)
def test_data_parallel_time_is_that_of_the_volumes_over_their_own_groups(degrees):
    """Experts are gathered, reduced and summed by the ranks that have them; the rig holds the volumes to real ones."""
    exact = replace(H100, intra_node_latency_s=0.0, inter_node_latency_s=0.0)
    exact = replace(exact, efficiency=replace(exact.efficiency, overlapped=0.0))
    shape, layout, costs = KNOWN["qwen3 30b"], Layout(**degrees), COSTS["fsdp"]
    case = TimedCase(shape, costs, layout, WORK, costs.program(layout), exact)
    (stage,) = pipeline_stages(shape.num_layers, 1)
    layer = layer_time(case.work, case.software, exact)
    found = costs.data_parallel_s(case, stage, layer, head_time(case.work, case.software, exact), 0.0)
    times = {"all-reduce": network.all_reduce_s, "all-gather": network.gather_s, "reduce-scatter": network.gather_s}
    carried = costs.data_parallel_traffic(case, stage)
    assert found == pytest.approx(sum(times[one.kind](exact, one.group, one.num_bytes) for one in carried))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("model", "degrees", "group"),
    [
        ("qwen3 8b", {"tp": 4}, network.Group(4, 1)),
        ("qwen3 8b", {"tp": 2, "sequence_parallel": True}, network.Group(2, 1)),
        ("qwen3 8b", {"dp_shard": 2, "cp": 4}, network.Group(4, 1)),
        ("qwen3 30b", {"dp_shard": 8, "ep": 4}, network.Group(4, 1)),
    ],
)
def test_exchanges_that_recomputation_repeats_take_the_time_of_their_volumes(model, degrees, group, recompute):
    """Nothing is computed while a process waits for them; the rig holds the volumes to real ones."""
    exact = replace(H100, intra_node_latency_s=0.0)
    instant = replace(exact, intra_node_gb_per_s=1e12)
    once, again = (Layout(**degrees, recompute=one) for one in ("none", recompute))
    waited, computed = (
        step_time(KNOWN[model], "fsdp", again, WORK, hardware).parts.recompute for hardware in (exact, instant)
    )
    volumes, of_once = (step_traffic(KNOWN[model], "fsdp", layout, WORK) for layout in (again, once))
    times = {"all-reduce": network.all_reduce_s}
    repeated = {kind: volumes[kind] - of_once[kind] for kind in volumes if volumes[kind] > of_once[kind]}
    expected = sum(times.get(kind, network.gather_s)(exact, group, size) for kind, size in repeated.items())
    assert waited - computed == pytest.approx(expected, rel=0.01)
    assert repeated


@pytest.mark.parametrize(
    ("part", "model", "degrees", "forward_share"),
    [
        ("tensor_parallel", "qwen3 8b", {"tp": 4}, 1 / 2),
        # Keys and values alone; backward with their gradients.
        ("context_parallel", "qwen3 8b", {"dp_shard": 2, "cp": 4}, 1 / 3),
        ("expert_parallel", "qwen3 30b", {"dp_shard": 8, "ep": 4}, 1 / 2),
    ],
)
def test_megatron_repeats_every_exchange_of_a_layer_that_it_recomputes(part, model, degrees, forward_share):
    slow = replace(H100, intra_node_latency_s=0.0, intra_node_gb_per_s=1e-3)  # nothing hides what is exchanged
    instant = replace(slow, intra_node_gb_per_s=1e12)
    waited, computed = (
        step_time(KNOWN[model], "megatron", Layout(**degrees, recompute="full"), WORK, hardware).parts
        for hardware in (slow, instant)
    )
    exchanged = getattr(waited, part) - getattr(computed, part)
    again = exchanged * forward_share * MEGATRON.recomputed_share
    assert waited.recompute - computed.recompute == pytest.approx(again, rel=0.01)


def test_layers_without_spread_experts_wait_for_one_gathering():
    slow, costs = replace(H100, intra_node_latency_s=1.0), COSTS["fsdp"]
    layout, (stage,) = Layout(dp_shard=8, reshard_after_forward=False), pipeline_stages(LLAMA.num_layers, 1)
    case = TimedCase(LLAMA, costs, layout, WORK, costs.program(layout), slow)
    layer = layer_time(case.work, case.software, slow)
    assert costs.forward_gather_s(case, stage, layer) == pytest.approx(1, rel=0.1)
