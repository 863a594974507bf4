"""A mixture's old choices of experts are replayed in the update, whatever its router is called and now prefers."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.data.batch import Batch, Rollouts
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.expert_choices import ExpertChoices, is_stack
from stages.engines.megatron.compat import prepare_megatron
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.grpo import GrpoConfig, GrpoLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import pack
from tests.zoo.models import load, tiny_model
from tests.zoo.proofs import save_family

prepare_megatron()
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from stages.engines.megatron.engine import MegatronEngine  # noqa: E402
from stages.engines.megatron.expert_choices import ExpertChoices as MegatronChoices  # noqa: E402

DOCUMENTS = [list(range(3, 19)), [5, 40, 7, 31, 2, 44, 9, 12]]
OPTIONS = GrpoConfig.model_validate({"rewards": {"any": {"type": "number"}}, "loss_type": "grpo"})


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Provide a function that builds an engine of a tiny model of a family, saved in a folder."""

    def build(
        family: str, engine: str = "fsdp", recompute: str = "none", adapter: AdapterConfig | None = None
    ) -> FsdpEngine | MegatronEngine:
        save_family(family, tmp_path / family)
        layout = Layout.model_validate({"micro_batch_size": 1, "recompute": recompute})
        settings = EngineSettings(layout, "fp32", AdamSettings(1e-3), adapter=adapter, replays_experts=True)
        engine_class = FsdpEngine if engine == "fsdp" else MegatronEngine
        return engine_class(ModelFacts(tmp_path / family), settings, torch.device("cpu"))

    with joined_processes():
        yield build
    parallel_state.destroy_model_parallel()


def batch_of(old: Tensor | None = None, experts: Tensor | None = None) -> Batch:
    batch = pack([[*DOCUMENTS]])
    if old is None:
        return batch
    batch = batch.with_signal(rollouts=Rollouts(torch.tensor([1.0, -0.5]), old))
    return batch.with_experts(experts) if experts is not None else batch


def change_routers(modules: Iterator[Any]) -> None:
    """Change routers, and nothing else, so that many tokens go to other experts."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in modules:
            if hasattr(module, "weight") and type(module).__name__.endswith("Router"):
                module.weight.add_(torch.randn(module.weight.shape) * module.weight.std())


def received(engine: FsdpEngine) -> list[Tensor]:
    """Return a list to which the choices that experts receive are added, layer by layer, in each forward pass."""
    seen: list[Tensor] = []
    for module in engine._model.modules():
        if is_stack(module):
            module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].int()))
    return seen


@pytest.mark.parametrize(
    ("family", "adapter"),
    [("qwen3_moe", None), ("gpt_oss", None), ("deepseek_v3", None), ("qwen3_moe", AdapterConfig(rank=2))],
)
def test_with_replay_the_old_policy_gives_the_ratio_one_and_routers_keep_its_choices(
    engines: Any, family: str, adapter: AdapterConfig | None
) -> None:
    """The recorded choices give the same log-probabilities to the bit; changed routers only weigh these experts.

    DeepSeek's router chooses groups first, by a `topk` that may give equal indices; an adapter wraps experts.
    """
    engine = engines(family, adapter=adapter)
    old, experts = engine.routed_log_probabilities(batch_of())
    assert torch.equal(engine.target_log_probabilities(batch_of(old, experts)), old), "π/π_old is 1"
    change_routers(engine._model.modules())
    seen = received(engine)
    engine.target_log_probabilities(batch_of(old, experts))
    assert torch.equal(torch.stack(seen), experts)
    seen.clear()
    engine.target_log_probabilities(batch_of(old))
    assert not torch.equal(torch.stack(seen), experts), "no replay: the routers' own"


@pytest.mark.parametrize(
    ("engine", "recompute"), [("fsdp", "none"), ("fsdp", "full"), ("fsdp", "selective"), ("megatron", "full")]
)
def test_an_update_with_replay_is_transformers_own_with_these_choices(
    engines: Any, tmp_path: Path, engine: str, recompute: str
) -> None:
    """Loss and gradient norm equal those of plain Transformers whose routers are given the indices."""
    trained = engines("qwen3_moe", engine, recompute)
    old, experts = trained.routed_log_probabilities(batch_of())
    assert torch.equal(trained.target_log_probabilities(batch_of(old, experts)), old), "π/π_old is 1"
    change_routers(
        chain.from_iterable(one.modules() for one in trained._chunks)
        if engine == "megatron"
        else trained._model.modules()
    )
    trained.export(tmp_path / "changed", torch.float32)
    model = load(tmp_path / "changed")
    loss, batch = GrpoLoss(OPTIONS), batch_of(old, experts)
    expected = reference_log_probabilities(model, experts)
    assert not torch.allclose(expected, reference_log_probabilities(model, None), atol=1e-2), "routers differ"
    totals = {name: torch.tensor(float(value)) for name, value in loss.counts(batch.signal).items()}
    of_reference, _ = loss(expected, batch.signal, totals)
    of_reference.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    outcome = trained.train_step([batch], loss, 1e-3, None)
    assert outcome.loss == pytest.approx(of_reference.item(), rel=1e-5)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert all(one.grad is not None for name, one in model.named_parameters() if "gate.weight" in name)


def test_chunks_of_a_pipeline_stage_keep_what_those_before_them_have_recorded(engines: Any) -> None:
    """An interleaved schedule runs one chunk after the other; here each has one layer."""
    layers = [one for one in engines("qwen3_moe", "megatron")._chunks[0].modules() if isinstance(one, TransformerLayer)]
    choices = MegatronChoices(layers)
    hidden = torch.randn(7, 1, layers[0].config.hidden_size)
    with choices.recording() as recorded:
        for layer in layers:
            choices.begin(None, 7)
            layer.mlp.router(hidden)
        experts = recorded()
    assert experts.shape == (len(layers), 7, layers[0].config.moe_router_topk)
    for number, layer in enumerate(layers):
        choices.begin(None, 7)
        routed = layer.mlp.router(hidden)[1]
        assert torch.equal(routed.nonzero()[:, 1].view(7, -1), experts[number].long().sort().values)


def reference_log_probabilities(model: Any, experts: Tensor | None) -> Tensor:
    """Return Transformers' log-probabilities of the targets, each document alone, with given experts, if any."""
    rows, start = [], 0
    for document in DOCUMENTS:
        layers = [layer.mlp for layer in model.model.layers]
        for layer, mixture in enumerate(layers):
            given = None if experts is None else experts[layer, start : start + len(document)].long()
            mixture.gate.forward = type(mixture.gate).forward.__get__(mixture.gate)
            if given is not None:
                mixture.gate.forward = GivenRouter(mixture.gate, given)
        start += len(document)
        logits = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
        targets = torch.tensor([*document[1:], 0])
        values = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        rows.append(values * torch.tensor([*[1.0] * (len(document) - 1), 0.0]))
    return torch.cat(rows)[None]


class GivenRouter:
    """Qwen 3's router with given indices: normalised softmax weights of these experts."""

    def __init__(self, gate: Any, indices: Tensor) -> None:
        self._gate, self._indices = gate, indices

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self._gate.weight.T
        values = logits.softmax(-1).gather(1, self._indices)
        if self._gate.norm_topk_prob:
            values = values / values.sum(-1, keepdim=True)
        return logits, values, self._indices


@pytest.mark.parametrize("family", ["qwen3", "llama4_text"])
def test_a_model_whose_experts_receive_no_choices_is_refused(family: str) -> None:
    with pytest.raises(ModelError, match="has no experts that receive a router's choices"):
        ExpertChoices(tiny_model(family))
