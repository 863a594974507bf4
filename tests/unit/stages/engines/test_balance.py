"""The expert-balancing loss equals Transformers' for each row; routers are found under any module name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter
from stages.core.errors import ModelError
from stages.engines.balance import balance_of_logits, num_tokens
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.moe import check_mixture, freeze_routers, routers_of
from stages.engines.settings import AdamSettings, EngineSettings, MoeSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import pack

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
COEFFICIENT = 0.3


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_each_row_gives_what_transformers_gives_it_alone_without_its_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 10, NUM_EXPERTS, generator=generator, requires_grad=True)
    lengths = [10, 7, 0]
    rows = torch.where(torch.arange(10) < torch.tensor(lengths)[:, None], torch.arange(3)[:, None], -1)
    found = balance_of_logits(logits, rows, EXPERTS_PER_TOKEN, len(rows))
    expected = sum(
        length * load_balancing_loss_func((logits[row, :length],), NUM_EXPERTS, EXPERTS_PER_TOKEN)
        for row, length in enumerate(lengths)
        if length
    )
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (found, expected))
    torch.testing.assert_close(*gradients)


def test_padding_is_of_no_row() -> None:
    batch = pack([[[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]]])
    assert batch.documents.token_rows.tolist() == [[0] * 5, [1] * 5]
    padded = batch.with_signal(documents=replace(batch.documents, count=3))
    assert padded.documents.token_rows.tolist() == [[0] * 5, [1, 1, -1, -1, -1]]
    assert num_tokens([batch, padded], lambda own: 2 * own) == 34


def test_with_one_row_and_one_layer_a_step_is_transformers_own(tmp_path: Any) -> None:
    """Loss and gradient of one row in a one-layer mixture equal Transformers' (`output_router_logits=True`)."""
    torch.manual_seed(0)
    fields = {**SIZES, "num_hidden_layers": 1, "router_aux_loss_coef": COEFFICIENT, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**fields))
    model.save_pretrained(tmp_path)
    document = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([document])
    output = model(input_ids=ids, labels=ids, output_router_logits=True)
    output.loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    settings = EngineSettings(
        Layout(micro_batch_size=1), "fp32", AdamSettings(learning_rate=1e-3), moe=MoeSettings(COEFFICIENT)
    )
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(tmp_path), settings, device)
        outcome = engine.train_step([pack([[document]])], SftLoss(), 1e-3, None)
    assert outcome.measured["aux_loss"] == pytest.approx(output.aux_loss.item(), rel=1e-6)
    assert outcome.loss + COEFFICIENT * outcome.measured["aux_loss"] == pytest.approx(output.loss.item(), rel=1e-6)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "o_proj")], ids=["all", "attention"])
def test_an_adapter_learns_from_the_balance_as_pefts_does(tmp_path: Any, targets: Any) -> None:
    """Balancing loss trains adapters as with PEFT, also of earlier layers, on which a router's output depends."""
    torch.manual_seed(0)
    fields = {**SIZES, "router_aux_loss_coef": COEFFICIENT, "initializer_range": 0.2, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**fields)).save_pretrained(tmp_path)
    adapter = AdapterConfig(rank=4, alpha=8, target_modules=targets)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    add_adapter(model, adapter, seed=0)
    document = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([document])
    norms = []
    for balances in (True, False):
        model.zero_grad()
        output = model(input_ids=ids, labels=ids, output_router_logits=balances)
        output.loss.backward()
        norms.append(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
    assert norms[0] > 1.03 * norms[1], "the balance is to be felt"
    settings = EngineSettings(
        Layout(micro_batch_size=1), "fp32", AdamSettings(1e-3), moe=MoeSettings(COEFFICIENT), adapter=adapter
    )
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(tmp_path), settings, device)
        outcome = engine.train_step([pack([[document]])], SftLoss(), 1e-3, None)
    assert outcome.grad_norm == pytest.approx(norms[0].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "routers"),
    [
        (Qwen3MoeConfig(**SIZES), "mlp.gate"),
        (Qwen2MoeConfig(**SIZES), "mlp.gate"),
        (MixtralConfig(**SIZES), "mlp.gate"),
        (GptOssConfig(**SIZES), "mlp.router"),
    ],
    ids=lambda one: getattr(one, "model_type", None),
)
def test_routers_and_nothing_else_are_frozen(config: Any, routers: str) -> None:
    model = on_meta(config)
    check_mixture(model, MoeSettings(COEFFICIENT, freeze_router=True))
    freeze_routers(model)
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(one)] for one in routers_of(model)] == [f"model.layers.{layer}.{routers}" for layer in (0, 1)]
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if f".{routers}." in name}


def test_a_dense_model_and_one_without_the_loss_are_refused() -> None:
    dense = on_meta(LlamaConfig(**SIZES))
    check_mixture(dense, MoeSettings())
    for moe in (MoeSettings(COEFFICIENT), MoeSettings(freeze_router=True)):
        with pytest.raises(ModelError, match="`moe` is for mixtures of experts, and LlamaForCausalLM has no routers"):
            check_mixture(dense, moe)
    mixture = on_meta(Qwen3MoeConfig(**SIZES))
    del mixture.num_experts_per_tok
    with pytest.raises(ModelError, match="does not tell it"):
        check_mixture(mixture, MoeSettings(COEFFICIENT))
