"""A layer of multi-token prediction learns what plain torch says, within documents, and is written as it was read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.mtp import check_mtp
from stages.engines.fsdp.probe import packed
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.loading import load_config
from stages.models.transformers_flops import model_flops
from stages.models.walk import walk
from stages.parallel.layout import Layout
from stages.planner.workload import Workload
from tests.mtp_models import MTP_LAYER, WEIGHTS, save_with_mtp
from tests.train_stage import make_config

WEIGHT = 0.3
LENGTHS = (9, 2, 6)
FAMILIES = list(MTP_LAYER)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    save_with_mtp(request.param, folder)
    return request.param, folder


def engine_of(folder: Path, weight: float = WEIGHT, **settings: Any) -> FsdpEngine:
    adam = AdamSettings(1e-3)
    made = EngineSettings(Layout(), "fp32", adam, mtp_loss_weight=weight, **settings)
    return FsdpEngine(ModelFacts(folder), made, torch.device("cpu"))


def batch_of(vocabulary: int) -> Batch:
    """Return a batch of three documents, of which the first has a prompt, and the second no token after the next."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, vocabulary, (length,), generator=generator) for length in LENGTHS]
    batch = packed(documents)
    targets = batch.signal.targets.clone()
    targets[0, :3] = IGNORED
    return batch.with_signal(targets=targets)


def with_one_more_layer(family: str, folder: Path, target: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return Transformers' model, in fp64, whose last layer is the MTP layer's, and the MTP layer's other weights."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("dtype", None)
    if "layer_types" in config:
        config["layer_types"] = [*config["layer_types"], "full_attention"]
    target.mkdir()
    layer = MTP_LAYER[family]
    weights = load_file(folder / WEIGHTS)
    others = {
        name.removeprefix(layer): one.double() for name, one in weights.items() if name.startswith((layer, "mtp."))
    }
    save_file({name.replace(layer, "model.layers.2."): one for name, one in weights.items()}, target / WEIGHTS)
    (target / "config.json").write_text(json.dumps(config))
    build = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(target, **build).eval(), others


def plain_losses(
    family: str, folder: Path, target: Path, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return mean cross-entropies of the next token and of the one after it, and all weights that they depend on."""
    model, others = with_one_more_layer(family, folder, target)
    decoder, layer = model.model, model.model.layers[2]
    names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if family == "qwen3_5_text":
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
    of_embedding, of_hidden, of_output, projection = (others[f"{name}.weight"].requires_grad_() for name in names)
    decoder.layers = decoder.layers[:2]
    decoder.config.num_hidden_layers = 2

    def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled = states * (states.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
        return scaled * (1 + weight if family == "qwen3_5_text" else weight)

    sums, counts = [0.0, 0.0], [0, 0]
    for ids, targets in zip(
        batch.inputs.input_ids[0].split(LENGTHS), batch.signal.targets[0].split(LENGTHS), strict=True
    ):
        hidden = decoder(input_ids=ids[None], use_cache=False).last_hidden_state
        both = torch.cat(
            [normed(decoder.embed_tokens(ids[None, 1:]), of_embedding), normed(hidden[:, :-1], of_hidden)], -1
        )
        positions = torch.arange(len(ids) - 1)[None]
        mask = torch.full((1, 1, len(ids) - 1, len(ids) - 1), -torch.inf, dtype=torch.float64).triu(1)
        axes = positions.expand(3, 1, -1) if family == "qwen3_5_text" else positions  # time, height and width
        angles = decoder.rotary_emb(both, axes)
        output = layer(both @ projection.T, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        output = output[0] if isinstance(output, tuple) else output
        for depth, (states, of_states) in enumerate([(hidden, targets), (normed(output, of_output), targets[1:])]):
            logits = model.lm_head(states)[0]
            loss = torch.nn.functional.cross_entropy(logits, of_states, ignore_index=IGNORED, reduction="sum")
            sums[depth] = sums[depth] + loss
            counts[depth] += int((of_states != IGNORED).sum())
    learning = [*model.parameters(), *layer.parameters(), of_embedding, of_hidden, of_output, projection]
    return sums[0] / counts[0], sums[1] / counts[1], learning


def test_loss_and_gradients_are_those_of_plain_torch(saved, one_process: None, tmp_path: Path) -> None:
    family, folder = saved
    engine = engine_of(folder)
    batch = batch_of(engine._model.causal_lm.config.vocab_size)
    main, ahead, learning = plain_losses(family, folder, tmp_path / "plain", batch)
    (main + WEIGHT * ahead).backward()
    squares = [one.grad.square().sum() for one in {id(one): one for one in learning}.values() if one.grad is not None]
    outcome = engine.train_step([batch], SftLoss(), 1e-3, None)
    assert outcome.loss == pytest.approx(main.item(), rel=1e-5)
    assert outcome.measured["mtp_loss"] == pytest.approx(ahead.item(), rel=1e-5)
    assert outcome.grad_norm == pytest.approx(sum(squares).sqrt().item(), rel=1e-4)


def test_its_cost_is_that_of_one_more_layer_and_head(saved, one_process: None, tmp_path: Path) -> None:
    """For MFU and for the planner. The projection of both inputs is a product that no other layer has."""
    family, folder = saved
    larger, _ = with_one_more_layer(family, folder, tmp_path / "larger")
    found, expected = engine_of(folder).flops, model_flops(larger)
    assert found.layer_parameters == expected.layer_parameters + 2 * larger.config.hidden_size**2
    assert (found.head_parameters, found.attention) == (2 * expected.head_parameters, expected.attention)
    planned = Workload(8, 1, predicts_ahead=True).trained_shape(walk(load_config(folder)))
    by_walk = walk(larger.config)
    assert planned.num_parameters == by_walk.num_parameters
    assert planned.flops().forward([8], 0) == pytest.approx(by_walk.flops().forward([8], 0))


def test_the_layer_learns_and_is_written_under_the_names_that_it_had(saved, one_process: None, tmp_path: Path) -> None:
    _, folder = saved
    engine = engine_of(folder)
    batch = batch_of(engine._model.causal_lm.config.vocab_size)
    losses = [engine.train_step([batch], SftLoss(), 3e-3, 1.0).measured["mtp_loss"] for _ in range(12)]
    assert losses[-1] < losses[0] / 2
    engine.export(tmp_path / "written", torch.float32)
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "written" / WEIGHTS)
    assert {name: one.shape for name, one in before.items()} == {name: one.shape for name, one in after.items()}
    same = [name for name in before if before[name].ndim > 1 and torch.equal(before[name].float(), after[name])]
    assert same == []
    for copy, original in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
        for name in after:
            if name.startswith("model.layers.2.") and name.endswith(f"{copy}.weight"):
                assert torch.equal(after[name], after[f"{original}.weight"])
    # What was written is read as it was: the next step's loss is that of the engine that wrote it.
    again = engine_of(tmp_path / "written").train_step([batch], SftLoss(), 1e-3, None)
    continued = engine.train_step([batch], SftLoss(), 1e-3, None)
    assert again.measured["mtp_loss"] == pytest.approx(continued.measured["mtp_loss"], rel=1e-5)


def test_a_resumed_training_goes_on_as_the_one_that_was_not_interrupted(saved, one_process, tmp_path: Path) -> None:
    _, folder = saved
    engine = engine_of(folder)
    batch = batch_of(engine._model.causal_lm.config.vocab_size)
    engine.train_step([batch], SftLoss(), 3e-3, 1.0)
    engine.save(tmp_path / "step-1").result()
    resumed = engine_of(folder)
    resumed.load(tmp_path / "step-1")
    for _ in range(2):
        assert resumed.train_step([batch], SftLoss(), 3e-3, 1.0) == engine.train_step([batch], SftLoss(), 3e-3, 1.0)


def test_other_forms_and_no_layer_are_refused_by_name(tmp_path: Path) -> None:
    save_with_mtp("qwen3_5_text", tmp_path)
    check_mtp(tmp_path, trust_remote_code=False)
    weights = load_file(tmp_path / WEIGHTS)
    renamed = {name.replace("mtp.fc", "mtp.input_proj"): one for name, one in weights.items()}
    save_file(renamed, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"in a form that is not known here .*such as mtp\.input_proj"):
        check_mtp(tmp_path, trust_remote_code=False)
    save_file({name: one for name, one in weights.items() if "mtp." not in name}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="holds none; remove it"):
        check_mtp(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"engine": "megatron"}, "`mtp_loss_weight` needs `engine: fsdp`, found megatron"),
        ({"method": "dpo"}, "does not go with `method: dpo`, whose loss is not over each next token"),
        ({"adapter": {}}, "does not go with `adapter`, which has no weights for the layer"),
    ],
    ids=["engine", "method", "adapter"],
)
def test_what_cannot_train_the_layer_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        make_config(mtp_loss_weight=WEIGHT, **fields)


def test_only_a_weight_above_0_changes_the_version() -> None:
    assert "mtp_loss_weight" not in make_config().identity()
    assert make_config(mtp_loss_weight=0).identity() == make_config().identity()
    assert make_config(mtp_loss_weight=WEIGHT).identity()["mtp_loss_weight"] == WEIGHT
