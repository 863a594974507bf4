"""Predicted memory follows the formulas of the papers, and more sharding never takes more memory."""

from dataclasses import replace

import pytest

from stages.models.known_models import KNOWN, gpt
from stages.parallel.layout import Layout
from stages.planner.activations import kept_bytes_per_token, recomputed_products_share
from stages.planner.adapted import PlannedAdapter, trained_parameters
from stages.planner.costs import StepCase
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import HARDWARE, Efficiency
from stages.planner.memory import GIB, memory
from stages.planner.partition import pipeline_stages
from stages.planner.time import step_time
from stages.planner.workload import ProgramTraits, Workload

GPT = gpt(layers=4, hidden=1024, heads=16, vocab=51200)
LLAMA = KNOWN["llama3 8b"]
PAPER = ProgramTraits(flash_attention=False, dropout=True, chunked_logits=False, gathers_gradients=False)
WORK = Workload(sequence_length=2048, global_batch_size=64)
NO_OVERHEAD = Efficiency(runtime_gib=0, communicator_gib=0, fragmentation=0)


def kept(layout: Layout, software: ProgramTraits = PAPER) -> float:
    """Return the activation bytes that a layer keeps for each token, divided by the hidden size."""
    return kept_bytes_per_token(StepCase(GPT, COSTS["megatron"], layout, WORK, software)) / GPT.hidden_size


def test_selective_recomputation_keeps_results_of_products():
    """Selective recomputation keeps the results of all, or of every second, matrix product in a Llama layer.

    Every second: queries, values, gate and down. The layer's input and attention's output are kept as well; if
    compiled, not the last result, which only the next layer needs.
    """
    hidden, keys, ffn = LLAMA.hidden_size, LLAMA.kv_width, LLAMA.ffn_size
    every_second = ProgramTraits(keeps_every_second_product=True)
    expected = {
        (ProgramTraits(), False): 4 * hidden + hidden + 2 * keys + 2 * ffn,
        (ProgramTraits(), True): 4 * hidden + 2 * keys + 2 * ffn,
        (every_second, False): 2 * hidden + hidden + keys + ffn + hidden,
        (every_second, True): 2 * hidden + hidden + keys + ffn,
    }
    for (software, compiles), numbers in expected.items():
        layout = Layout(recompute="selective", compile=compiles)
        assert kept_bytes_per_token(StepCase(LLAMA, COSTS["fsdp"], layout, WORK, software)) == 2 * numbers


def test_what_selective_recomputation_drops_is_computed_again():
    hidden, keys, ffn = LLAMA.hidden_size, LLAMA.kv_width, LLAMA.ffn_size
    share = (keys + hidden + ffn) / (2 * hidden + 2 * keys + 3 * ffn)
    assert recomputed_products_share(LLAMA, ProgramTraits(keeps_every_second_product=True)) == pytest.approx(share)
    assert recomputed_products_share(LLAMA, ProgramTraits()) == 0


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_of_a_layer_are_those_of_korthikanti(tp):
    scores = 5 * GPT.num_heads * WORK.sequence_length / GPT.hidden_size
    assert kept(Layout(tp=tp)) == pytest.approx(10 + 24 / tp + scores / tp)  # table 2, tensor parallel
    assert kept(Layout(tp=tp, sequence_parallel=True)) == pytest.approx((34 + scores) / tp)  # + sequence parallel
    selective = Layout(tp=tp, sequence_parallel=True, recompute="selective")
    assert kept(selective) == pytest.approx(34 / tp)  # + selective recomputation
    assert kept(Layout(tp=tp, recompute="full")) == 2  # full recomputation


def test_flash_attention_keeps_no_scores():
    assert kept(Layout(), replace(PAPER, flash_attention=True)) == pytest.approx(34)


def test_adam_in_mixed_precision_takes_eighteen_bytes_a_parameter_less_what_is_sharded():
    """Mixed-precision Adam with fp32 gradients takes 2 + 4 + 12 / dp bytes a parameter (Rajbhandari et al. 2020)."""
    for dp_shard in (1, 8):
        worst = memory(GPT, "megatron", Layout(dp_shard=dp_shard), WORK, efficiency=NO_OVERHEAD).worst
        states = (worst.weights + worst.gradients + worst.optimizer) * GIB
        assert states == pytest.approx(GPT.num_parameters * (2 + 4 + 12 / dp_shard), rel=0.01)


def test_fsdp_shards_all_of_sixteen_bytes_a_parameter():
    for dp_shard in (1, 8):
        worst = memory(LLAMA, "fsdp", Layout(dp_shard=dp_shard), WORK, efficiency=NO_OVERHEAD).worst
        states = (worst.weights + worst.gradients + worst.optimizer) * GIB
        assert states == pytest.approx(LLAMA.num_parameters * 16 / dp_shard)


@pytest.mark.parametrize("vpp", [1, 4])
def test_first_stage_holds_the_micro_batches_in_flight_of_korthikanti(vpp):
    """The first pipeline stage keeps as many activations as Korthikanti et al. compute in equation 2.

    A 1F1B schedule keeps as much as without a pipeline; interleaving keeps (p - 1) / (p m) more.
    """
    pp, shape = 4, replace(GPT, num_layers=32)
    alone = memory(shape, "megatron", Layout(), replace(WORK, global_batch_size=64), software=PAPER).stages[0]
    first = memory(shape, "megatron", Layout(pp=pp, vpp=vpp), WORK, software=PAPER).stages[0]
    expected = 1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1
    assert first.activations / alone.activations == pytest.approx(expected)


def test_last_stage_alone_holds_logits():
    stages = memory(LLAMA, "megatron", Layout(pp=4), WORK).stages
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]


def test_quick_estimate_finds_the_fullest_stage():
    for layout in (Layout(pp=4), Layout(pp=8, vpp=4), Layout(tp=2, pp=16, micro_batch_size=2)):
        whole = memory(LLAMA, "megatron", layout, WORK)
        assert memory(LLAMA, "megatron", layout, WORK, every_stage=False).peak_gib == pytest.approx(whole.peak_gib)


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("megatron", {"tp": 8, "sequence_parallel": True}),
        ("megatron", {"cp": 2}),
        ("megatron", {"dp_shard": 8}),
        ("megatron", {"recompute": "full"}),
        ("fsdp", {"dp_shard": 8}),
        ("fsdp", {"dp_shard": 8, "cpu_offload": True}),
        ("fsdp", {"recompute": "selective"}),
        ("fsdp", {"recompute": "full"}),
        ("fsdp", {"recompute": "offload"}),
    ],
)
def test_what_saves_memory_is_predicted_to(engine, more):
    assert memory(LLAMA, engine, Layout(**more), WORK).peak_gib < memory(LLAMA, engine, Layout(), WORK).peak_gib


def test_adapters_have_the_only_gradients_and_optimizer():
    whole = memory(LLAMA, "megatron", Layout(), WORK).worst
    adapters = memory(LLAMA, "megatron", Layout(), replace(WORK, adapter=PlannedAdapter(16))).worst
    (stage,) = pipeline_stages(LLAMA.num_layers, 1)
    factors = trained_parameters(LLAMA, PlannedAdapter(16), True, stage, 1, 1)
    masks = 32 * 16 * (3 * (4096 + 2 * 1024) + 2 * (2 * 14336))  # of joint rows, and the masked B
    assert adapters.weights * GIB == pytest.approx(whole.weights * GIB + 2 * factors + 2 * 2 * masks)
    assert adapters.gradients < whole.gradients / 50 and adapters.optimizer < whole.optimizer / 50


def test_tensor_parallelism_cuts_one_factor_of_each_pair():
    """Tensor parallelism cuts one of a matrix's LoRA factors; 7 of Llama 3 70B's stay whole a layer, 8,192 wide."""
    whole, cut = 7 * 8192, 2 * 8192 + 2 * 1024 + 3 * 28672
    llama, adapter = KNOWN["llama3 70b"], PlannedAdapter(16)
    (stage,) = pipeline_stages(llama.num_layers, 1)
    for tp in (1, 8):
        expected = 16 * (whole + cut / tp)
        assert trained_parameters(llama, adapter, True, stage, tp, 1) == 80 * expected
        workload = replace(WORK, adapter=adapter, precision="fp32")
        adapter_memory = memory(llama, "megatron", Layout(tp=tp), workload).worst
        assert adapter_memory.gradients * GIB == pytest.approx(80 * expected * 4)


def test_experts_are_spread_over_expert_parallelism():
    mixtral = KNOWN["mixtral 8x7b"]
    alone, spread = (memory(mixtral, "megatron", Layout(dp_shard=8, ep=ep), WORK).worst.weights for ep in (1, 8))
    experts = mixtral.num_mixture_layers * mixtral.num_experts * mixtral.expert_parameters * 2 / GIB
    assert alone - spread == pytest.approx(experts * 7 / 8)


def test_what_stays_leaves_no_gaps_between_tensors():
    efficiency = replace(NO_OVERHEAD, fragmentation=0.2)
    for software in (PAPER, replace(PAPER, fragments_states=True)):
        worst = memory(GPT, "megatron", Layout(), WORK, software=software, efficiency=efficiency).worst
        states = worst.weights + worst.gradients + worst.optimizer
        passing = worst.activations + worst.workspace + worst.logits + worst.communication
        expected = passing + states if software.fragments_states else passing
        assert worst.runtime == pytest.approx(0.2 * expected)


def test_recomputation_of_some_layers_saves_and_costs_its_share():
    whole, none, half = (
        kept(Layout(recompute=recompute), replace(PAPER, recomputed_share=share))
        for recompute, share in (("full", 1.0), ("none", 1.0), ("full", 0.5))
    )
    assert half == pytest.approx((whole + none) / 2)
    hardware, full = HARDWARE["h100-80gb"], Layout(recompute="full")
    half_s, whole_s = (
        step_time(
            GPT, "megatron", full, WORK, hardware, software=replace(PAPER, recomputed_share=share)
        ).parts.recompute
        for share in (0.5, 1.0)
    )
    assert half_s == pytest.approx(whole_s / 2)


@pytest.mark.parametrize("shards", [1, 8])
def test_what_is_offloaded_takes_as_much_of_the_host(shards):
    """CPU offload needs 16 bytes of host memory a parameter, for weights, gradients and two moments in fp32."""
    layout = Layout(dp_shard=shards, cpu_offload=True)
    found = memory(LLAMA, "fsdp", layout, WORK)
    assert found.host_gib == pytest.approx(16 * LLAMA.num_parameters / shards / GIB)
    assert memory(LLAMA, "fsdp", Layout(dp_shard=shards), WORK).host_gib == 0


def test_logits_that_a_program_keeps_are_there_beside_their_gradient_and_through_the_backward_pass():
    """A fused loss in place holds 2 bytes a logit; one that leaves logits to others 4, of which 2 last."""
    work, layout = Workload(2048, 8), Layout(dp_shard=8)
    fused = ProgramTraits(chunked_logits=False, fused_cross_entropy=True)
    keeps = replace(fused, keeps_logits=True)
    logits = 2048 * LLAMA.vocab_size
    in_place, beside = (
        memory(LLAMA, "fsdp", layout, work, software=one, efficiency=NO_OVERHEAD) for one in (fused, keeps)
    )
    assert (beside.worst.logits - in_place.worst.logits) * GIB == pytest.approx(2 * logits)
    many = Layout(dp_shard=8, recompute="full")  # whose layer needs more than the head
    wide = replace(LLAMA, ffn_size=100 * LLAMA.ffn_size)
    worst = memory(wide, "fsdp", many, work, software=keeps, efficiency=NO_OVERHEAD).worst
    assert worst.workspace > 0 and worst.logits * GIB == pytest.approx(2 * logits)


def test_offloaded_activations_of_all_layers_but_the_last_take_memory_of_the_host():
    layout = Layout(recompute="offload", micro_batch_size=8)
    case = StepCase(LLAMA, COSTS["fsdp"], layout, WORK, COSTS["fsdp"].software)
    per_layer_gib = WORK.sequence_length * 8 * kept_bytes_per_token(case) / GIB
    found, with_states = (
        memory(LLAMA, "fsdp", one, WORK) for one in (layout, layout.model_copy(update={"cpu_offload": True}))
    )
    assert found.host_gib == pytest.approx((LLAMA.num_layers - 1) * per_layer_gib)
    assert with_states.host_gib == pytest.approx(found.host_gib + 16 * LLAMA.num_parameters / GIB)
    # At the peak, one layer runs backward, and the activations of the one before it have come back.
    assert found.worst.activations == pytest.approx(2 * per_layer_gib)
