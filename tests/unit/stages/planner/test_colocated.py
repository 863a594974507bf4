"""Both phases of a training that shares its devices with the server that samples are planned: learning and sampling."""

from dataclasses import replace

import pytest

from stages.core.errors import LayoutError
from stages.models.known_models import known_model
from stages.parallel.layout import Layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import Efficiency, built_in
from stages.planner.memory import ASLEEP_GIB, GIB, memory
from stages.planner.prediction import check_memory, predicted_metrics, server_share
from stages.planner.search import UNCERTAINTY, estimate, fitting_layouts
from stages.planner.workload import ColocatedServer, Workload

SHAPE = known_model("qwen3-0.6b")
WORK = Workload(2048, 64)
SERVER = ColocatedServer(tensor_parallel_size=1, bytes_per_number=2, num_tokens=2048)
LAYOUT = Layout(micro_batch_size=2, recompute="full")
RTX_4090 = SearchRequest(SHAPE, WORK, built_in("rtx-4090"), 1, server=SERVER)
BILLIONS = SHAPE.num_parameters / GIB


def sampling_of(engine: str, server: ColocatedServer = SERVER, layout: Layout = LAYOUT):
    return memory(SHAPE, engine, layout, WORK, server=server).sampling


def test_sampling_takes_what_training_keeps_and_what_the_server_holds() -> None:
    """FSDP2 keeps 12 bytes a parameter and the gathered head, Megatron gradient buffers; a reference adds weights."""
    head_gib = 2 * SHAPE.embedding_parameters / GIB  # bf16, tied
    fsdp = sampling_of("fsdp")
    assert fsdp.training_states == pytest.approx(12 * BILLIONS + head_gib)
    assert fsdp.server_weights == pytest.approx(2 * BILLIONS)
    assert fsdp.kv_cache == pytest.approx(2048 * 28 * 2 * 8 * 128 * 2 / GIB)
    gradients_gib = memory(SHAPE, "megatron", LAYOUT, WORK).worst.gradients
    states_gib = sum(getattr(memory(SHAPE, "megatron", LAYOUT, WORK).worst, name) for name in ("weights", "optimizer"))
    assert sampling_of("megatron").training_states == pytest.approx(states_gib + gradients_gib)
    two = Layout(dp_shard=2, micro_batch_size=2, reshard_after_forward=False)
    assert sampling_of("fsdp", layout=two).training_states == pytest.approx(6 * BILLIONS + 2 * BILLIONS)
    held = sampling_of("fsdp", replace(SERVER, tensor_parallel_size=2, kv_cache_gib=3.5, has_reference=True))
    assert held.training_states == pytest.approx(16 * BILLIONS + head_gib)
    assert held.server_weights == pytest.approx(BILLIONS)
    assert held.kv_cache == 3.5


def test_the_phase_that_takes_more_decides() -> None:
    """Learning counts the sleeping server; a KV cache that leaves no room for the training's states is refused."""
    alone = estimate(replace(RTX_4090, server=None), "fsdp", LAYOUT)
    beside = estimate(RTX_4090, "fsdp", LAYOUT)
    asleep_gib = ASLEEP_GIB + Efficiency().runtime_gib
    assert beside.memory.peak_gib == pytest.approx(alone.memory.peak_gib + asleep_gib)
    assert predicted_metrics(beside)["predicted_memory_gib"] == predicted_metrics(alone)["predicted_memory_gib"]
    check_memory(RTX_4090, beside, RTX_4090.memory_gib)
    large = replace(RTX_4090, server=replace(SERVER, kv_cache_gib=18.0))
    full = estimate(large, "fsdp", LAYOUT)
    assert not fitting_layouts(replace(large, engines=("megatron",)))
    with pytest.raises(LayoutError, match=r"out of memory while completions are sampled: .*kv_cache 18\.0"):
        check_memory(large, full, large.memory_gib)


def test_the_servers_share_leaves_what_training_keeps() -> None:
    sampling, total_gib = sampling_of("fsdp"), RTX_4090.memory_gib
    share = server_share(sampling, total_gib, Efficiency())
    kept_gib = (1 + UNCERTAINTY) * sampling.training_states + Efficiency().runtime_gib
    assert share * total_gib + kept_gib == pytest.approx(total_gib)
    assert server_share(sampling, 2000.0, Efficiency()) == 0.92, "vLLM's own default is the most"
