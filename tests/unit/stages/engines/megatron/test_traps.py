"""Tests against silent errors of Megatron-core that our engine must avoid, one for each error.

Other such errors are tested in `tests/parity`: gradients under interleaved stages on gloo, weights exported while their
gathering is still due, mixtures without Transformer Engine, experts reduced over tensor-parallel ranks, Transformers
5's spellings.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from stages.core.errors import ModelError
from stages.engines.megatron.compat import prepare_megatron
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout

prepare_megatron()
from stages.engines.megatron.adapter import PeftAdapter, adapt  # noqa: E402
from stages.engines.megatron.model import (  # noqa: E402
    build_model_chunks,
    layers_of_stages,
    padded_vocabulary,
    transformer_config,
)
from stages.engines.megatron.parallel import start_model_parallel  # noqa: E402

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 24}
DENSE = ModelShape(**SIZES, vocab_size=32, family="llama")
MIXTURE = ModelShape(**SIZES, vocab_size=32, num_experts=4, experts_per_token=2, expert_ffn_size=8)


@pytest.fixture
def chunks():
    """Provide a function that builds a Megatron model of given sizes in a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def build(shape):
        start_model_parallel(Layout(), is_mixture=shape.num_experts > 0, seed=0)
        return build_model_chunks(shape, Layout(), "fp32", CPU)

    yield build
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_split_parameters_are_marked_or_gradient_norms_would_count_them_wrongly(chunks):
    marked = {
        name
        for chunk in chunks(DENSE)
        for name, parameter in chunk.named_parameters()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    split = ("word_embeddings", "output_layer", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert all(any(part in name for name in marked) for part in split)
    assert not any("norm" in name for name in marked)


def test_experts_are_reduced_over_those_that_have_the_same_ones(chunks):
    parameters = dict(chunks(MIXTURE)[0].named_parameters())
    are_experts = {name: not getattr(parameter, "allreduce", True) for name, parameter in parameters.items()}
    assert {name for name, is_expert in are_experts.items() if is_expert} == {
        name for name in parameters if ".experts." in name
    }
    assert any(are_experts.values())


def adapter_on(layer, rows, columns):
    """Return an adapter with rank-2 LoRA factors for one layer, named as PEFT names them."""
    values = {
        f"{layer}.lora_A.default.weight": torch.ones(2, columns),
        f"{layer}.lora_B.default.weight": torch.ones(rows, 2),
    }
    return PeftAdapter({"lora_dropout": 0.0}, {layer: (2, 1.0)}, values)


def test_factors_belong_to_the_layer_that_uses_them_or_stale_ones_would_be_used(chunks):
    """LoRA factors belong to the layer that uses them, since Megatron could otherwise use outdated values.

    When gathering overlaps with compute, it waits in hooks of the module that owns the parameters.
    """
    (chunk,) = chunks(DENSE)
    adapt([chunk], DENSE, adapter_on("model.layers.1.self_attn.v_proj", 8, 16))
    learning = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    assert learning == {f"decoder.layers.1.self_attention.linear_qkv.lora_{factor}" for factor in "AB"}


def test_recomputation_finds_that_a_frozen_model_needs_gradients(chunks):
    (chunk,) = chunks(DENSE)
    adapt([chunk], DENSE, adapter_on("model.layers.0.mlp.down_proj", 16, 24))
    assert chunk.embedding(torch.zeros(1, 4, dtype=torch.int64), None).requires_grad


def test_a_layer_that_has_no_place_in_megatron_is_named(chunks):
    with pytest.raises(ModelError, match=r"none for 2 factors that PEFT has \(model\.layers\.0\.mlp\.gate\.lora_A"):
        adapt(chunks(DENSE), DENSE, adapter_on("model.layers.0.mlp.gate", 4, 16))


def test_interleaved_stages_exchange_tensors_in_the_one_way_that_is_right_on_gloo():
    config = transformer_config(DENSE, Layout(pp=2, vpp=1), "fp32", CPU)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (False, True)
    shape = ModelShape(**{**SIZES, "num_layers": 4}, vocab_size=32)
    config = transformer_config(shape, Layout(pp=2, vpp=2), "fp32", CPU)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm, config.deallocate_pipeline_outputs) == (True, False, False)


def test_mixtures_are_dispatched_in_the_way_that_allows_uneven_tokens():
    assert transformer_config(MIXTURE, Layout(), "fp32", CPU).moe_token_dispatcher_type == "alltoall"


def test_gradients_are_added_up_not_averaged():
    assert transformer_config(DENSE, Layout(), "fp32", CPU).calculate_per_token_loss


def test_stages_share_layers_as_evenly_as_can_be_and_the_first_have_more():
    assert layers_of_stages(8, 4) == [2, 2, 2, 2]
    assert layers_of_stages(7, 3) == [3, 2, 2]


def test_the_vocabulary_is_padded_to_what_tensor_parallelism_divides():
    assert padded_vocabulary(ModelShape(**SIZES, vocab_size=63), tp=2) == 64
    assert padded_vocabulary(ModelShape(**SIZES, vocab_size=64), tp=2) == 64
