"""Families of the zoo whose matrices or tokens are split over processes learn what plain Transformers does."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.models.walk import walk
from tests.parity.ranks import Ranks
from tests.parity.test_fsdp import learn_plainly, make_config, make_data, train_plainly
from tests.zoo.models import FAMILIES, tiny_config, tiny_model
from tests.zoo.splitting import fields_to_split

Data = list[list[list[list[int]]]]
"""Type of token ids, by step, row and document."""
pytestmark = pytest.mark.nightly
LARGEST_OF_WEIGHTS = 5e-6
"""Largest difference of a weight from that of plain Transformers after five steps."""

SPLIT = (
    "mistral", "gemma2", "gemma3_text", "phi3", "cohere2", "olmo2", "olmo3", "glm4", "gpt_neox", "qwen3", "ministral",
    "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "ernie4_5_moe", "qwen3_5_text",
)  # fmt: skip
"""Sliding windows, soft caps, norms of heads, tied and fused matrices, experts, latent attention, states."""
LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"tp": 2, "micro_batch_size": 2},
    "tp, dp": {"dp_shard": 2, "tp": 2, "micro_batch_size": 1},
    "cp": {"cp": 2, "micro_batch_size": 2},
    "cp of four": {"cp": 4, "micro_batch_size": 1},
    "cp, dp": {"dp_shard": 2, "cp": 2, "micro_batch_size": 1},
    "cp, tp": {"cp": 2, "tp": 2, "micro_batch_size": 2},
    "ep": {"dp_shard": 2, "ep": 2, "micro_batch_size": 2},
    "ep, dp": {"dp_shard": 4, "ep": 2, "micro_batch_size": 1},
    "ep, replicas": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "micro_batch_size": 1},
    "ep, tp": {"dp_shard": 2, "ep": 2, "tp": 2, "micro_batch_size": 2},
    "ep, cp": {"cp": 2, "ep": 2, "micro_batch_size": 2},
}
SPLIT_TOKENS: dict[str, dict[str, Any]] = {
    f"{name}, tokens{''.join(f', {one}' for one in more.values())}": {**LAYOUTS[name], "sequence_parallel": True} | more
    for name in ("tp", "tp, dp", "cp, tp")
    for more in ({}, {"recompute": "full"}, {"recompute": "selective"}, {"recompute": "offload"})
}
"""Layouts whose processes have tokens of their own between blocks."""
IN_TOKENS = ("mistral", "gemma2", "gemma3_text", "cohere2", "gpt_neox", "qwen3", "starcoder2")
"""Families of norms and blocks of columns, then rows: tied, with windows, soft caps, biases, norms of heads."""
WITHOUT_FLAWS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4": {
        "text_config": {
            **FAMILIES["gemma4"]["text_config"],
            "hidden_size_per_layer_input": 0,
            "initializer_range": 0.05,
        }
    },
}
"""Fields of families whose code a plan does not fit: without what it sums over split states or reads beside them."""
OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp, compiled": {"tp": 2, "micro_batch_size": 2, "compile": True},
    "cp, compiled": {"cp": 2, "micro_batch_size": 2, "compile": True, "recompute": "selective"},
    "tp, dp, offloaded": {**LAYOUTS["tp, dp"], "cpu_offload": True},
    "tp, dp, activations offloaded": {**LAYOUTS["tp, dp"], "recompute": "offload"},
}
"""Layouts that few families are trained under."""
SPREAD = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3",
    "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "dots1", "lfm2_moe", "nemotron_h", "minimax",
)  # fmt: skip
"""Mixtures of experts: with biases, shared experts, groups of experts, without a gate, beside states."""
STATEFUL = {"qwen3_5_text": "Qwen3_5GatedDeltaNet", "lfm2": "Lfm2ShortConv", "falcon_h1": "FalconH1Mixer"}
"""Modules that carry a state along the tokens, by family."""
CASES = [
    *(
        (family, name)
        for family in SPLIT
        for name in LAYOUTS
        if "cp" not in name or family not in STATEFUL
        if "ep" not in name
    ),
    *(("gpt_oss", name) for name in ("cp", "cp of four", "cp, dp")),  # sinks, and no plan
    *(("deepseek_v2", "cp"), ("llama", "cp of four")),
    *((family, name) for family in SPREAD for name in ("ep", "ep, dp")),
    *(("qwen3_moe", name) for name in ("ep, replicas", "ep, tp", "ep, cp")),
    *(("deepseek_v3", "ep, tp"), ("gpt_oss", "ep, replicas")),
    *((family, name) for family in ("gemma2", "qwen3_moe") for name in OTHER_LAYOUTS),
    *((family, name) for family in IN_TOKENS for name in SPLIT_TOKENS),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_family_in_parts_learns_what_plain_transformers_does(
    family: str, name: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    _check(made(family), family, {**LAYOUTS, **OTHER_LAYOUTS, **SPLIT_TOKENS}[name], fsdp_ranks, tmp_path)


@pytest.mark.parametrize("name", ["tp", "tp, dp"])
@pytest.mark.parametrize("family", WITHOUT_FLAWS)
def test_a_family_whose_plan_fits_some_configs_learns_by_those_what_plain_transformers_does(
    family: str, name: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    fields = WITHOUT_FLAWS[family] | fields_to_split(family)
    assert not walk(tiny_config(family, **fields)).split_flaw and walk(tiny_config(family)).split_flaw
    _check(tiny_model(family, **fields), family, LAYOUTS[name], fsdp_ranks, tmp_path, without_padding(make_data(5)))


def without_padding(data: Data) -> Data:
    """Return documents with another token instead of padding, at whose embedding, 0, Gemma 3n has no gradient."""
    return [[[[one or 1 for one in document] for document in row] for row in rows] for rows in data]


@pytest.mark.parametrize("family", IN_TOKENS)
def test_gradients_of_split_tokens_are_as_exact_as_those_of_transformers(
    family: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    """Both round in fp32, by up to 2e-6 of a weight's largest gradient: Transformers in fp64 says what is right."""
    made(family).save_pretrained(tmp_path / family)
    data = make_data(1)
    exact, plain = (_first_gradients(tmp_path / family, data, dtype) for dtype in (torch.float64, torch.float32))
    train(family, SPLIT_TOKENS["tp, tokens"], data, fsdp_ranks, tmp_path)
    found = load_file(tmp_path / f"{family}.gradients.safetensors")
    # Of weights whose gradient is next to none, as of keys' biases, the rounding of the others is all that is seen.
    least = 1e-3 * max(one.abs().max() for one in exact.values())
    own, theirs = (
        max((given[name] - one).abs().max() / max(one.abs().max(), least) for name, one in exact.items())
        for given in (found, plain)
    )
    assert own <= 1.5 * theirs


def made(family: str) -> Any:
    """Return a tiny model, with two heads of keys where its family can have them: one is not divided by two."""
    return tiny_model(family, initializer_range=0.05, **fields_to_split(family))


def _first_gradients(folder: Path, data: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the gradients of plain Transformers' first step in a precision, by the names of weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    _, _, trained = learn_plainly(model, [{"params": [*model.parameters()]}], data)
    return trained.first_gradients


@pytest.mark.parametrize(("family", "whole"), [("deepseek_v3", "q_a_proj"), ("qwen3", "")])
def test_what_a_plan_leaves_whole_is_said(family: str, whole: str, fsdp_ranks: Ranks, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / family)
    found = train(family, LAYOUTS["tp"], make_data(1), fsdp_ranks, tmp_path)["left_whole"]
    assert (f"self_attn.{whole}.weight" in found) if whole else not found


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_processes_whose_experts_no_token_chose_neither_hang_nor_change_what_is_learnt(
    experts_per_token: int, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    """Only one process has the first two of four experts, to which a router's bias sends all tokens of all."""
    model = tiny_model("gpt_oss", initializer_range=0.05, num_experts_per_tok=experts_per_token)
    for name, weight in model.named_parameters():
        if name.endswith("router.bias"):
            weight.data += torch.tensor([200.0, 100.0, 0.0, 0.0])
    _check(model, "gpt_oss", {**LAYOUTS["ep"], "recompute": "full"}, fsdp_ranks, tmp_path)


def _check(
    model: Any, family: str, layout: dict[str, Any], ranks: Ranks, tmp_path: Path, data: Data | None = None
) -> None:
    """Compare five steps from a model on several processes with plain Transformers."""
    model.save_pretrained(tmp_path / family)
    data = data or make_data(5)
    losses, grad_norms, model = train_plainly(tmp_path / family, data)
    found = train(family, layout, data, ranks, tmp_path)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)
    assert found["grad_norms"] == pytest.approx(grad_norms, rel=1e-4)
    gradients = load_file(tmp_path / f"{family}.gradients.safetensors")
    for weight, gradient in model.first_gradients.items():
        assert (gradients[weight] - gradient).abs().max() < 1e-4 * gradient.abs().max() + 1e-8, weight
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / family, dtype=torch.float32).state_dict()
    for weight, value in model.state_dict().items():
        assert (exported[weight] - value).abs().max() < LARGEST_OF_WEIGHTS, weight


@pytest.mark.parametrize("name", ["tp", "ep, tp"])
def test_an_adapter_made_of_whole_weights_starts_from_the_base_beside_fused_matrices(
    name: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    """The first process has the weights, of which the others get their parts: of both projections in one matrix."""
    tiny_model("qwen3_moe", initializer_range=0.05).save_pretrained(tmp_path / "qwen3_moe")
    data = make_data(1)
    losses, _, _ = train_plainly(tmp_path / "qwen3_moe", data)
    adapter = {"rank": 4, "target_modules": ["q_proj"], "init": "pissa"}
    found = train("qwen3_moe", LAYOUTS[name], data, fsdp_ranks, tmp_path, adapter=adapter)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)


def test_a_plan_that_lacks_a_sum_is_refused(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    """Nemotron has no plan; Qwen3 has one, by which norms of heads whose gradients are not summed would be wrong."""
    torch.manual_seed(0)
    tiny_model("nemotron").save_pretrained(tmp_path / "nemotron")
    with pytest.raises(RuntimeError, match="has no plan of tensor parallelism in Transformers; set `tp: 1`"):
        train("nemotron", LAYOUTS["tp"], make_data(1), fsdp_ranks, tmp_path)
    tiny_model("qwen3").save_pretrained(tmp_path / "qwen3")
    with pytest.raises(RuntimeError, match=r"the gradient of model.layers.\d.self_attn.[qk]_norm.weight by"):
        train("qwen3", LAYOUTS["tp"], make_data(1), fsdp_ranks, tmp_path, "tests.parity.lost_sum_program")


@pytest.mark.parametrize(("family", "part"), [("glm4", "mlp"), ("qwen3_moe", "mlp"), ("olmo2", "self_attn")])
def test_tokens_are_not_split_around_blocks_of_another_form(
    family: str, part: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path / family)
    with pytest.raises(RuntimeError, match=rf"layers\.\d\.{part} of .* is no norm.*; set `sequence_parallel: false`"):
        train(family, SPLIT_TOKENS["tp, tokens"], make_data(1), fsdp_ranks, tmp_path)


@pytest.mark.parametrize("family", STATEFUL)
def test_a_state_along_the_tokens_is_refused_by_name(family: str, fsdp_ranks: Ranks, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / family)
    with pytest.raises(RuntimeError, match=rf"{STATEFUL[family]} .* carry a state .*; set `cp: 1`, and `dp_shard: 2`"):
        train(family, LAYOUTS["cp"], make_data(1), fsdp_ranks, tmp_path)


@pytest.mark.parametrize(("family", "name"), [("gpt_oss", "ep, dp"), ("gpt_oss", "cp"), ("qwen3_moe", "tp")])
def test_results_of_experts_are_kept_where_nothing_is_added_to_them_in_place(
    family: str, name: str, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    _check(
        tiny_model(family, initializer_range=0.05),
        family,
        {**LAYOUTS[name], "recompute": "selective"},
        fsdp_ranks,
        tmp_path,
    )


def test_the_zoo_has_the_families() -> None:
    assert {*SPLIT, *SPREAD, *STATEFUL} <= set(FAMILIES)


def train(
    family: str,
    layout: dict[str, Any],
    data: Data,
    ranks: Ranks,
    folder: Path,
    program: str = "tests.parity.fsdp_program",
    **fields: Any,
) -> dict[str, Any]:
    case = {"model": str(folder / family), "config": {**make_config(layout), **fields}}
    (folder / "spec.json").write_text(
        json.dumps({"data": data, "cases": {family: case}, "output": str(folder / "out")})
    )
    (folder / "out").mkdir(exist_ok=True)
    processes = math.prod(layout.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp", "tp"))
    ranks.run(program, processes, folder / "spec.json", log=folder / "log.txt")
    (folder / "out" / f"{family}.gradients.safetensors").rename(folder / f"{family}.gradients.safetensors")
    return json.loads((folder / "out" / f"{family}.json").read_text())
