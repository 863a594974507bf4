"""Families of the zoo whose matrices are split over `tp` by Transformers' plans learn what plain Transformers does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.ranks import Ranks
from tests.parity.test_fsdp import make_config, make_data, train_plainly
from tests.zoo.models import FAMILIES, tiny_model

pytestmark = pytest.mark.nightly

SPLIT = (
    "mistral", "gemma2", "gemma3_text", "phi3", "cohere2", "olmo2", "olmo3", "glm4", "gpt_neox", "qwen3", "ministral",
    "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "ernie4_5_moe", "qwen3_5_text",
)  # fmt: skip
"""Sliding windows, soft caps, norms of heads, tied and fused matrices, experts, latent attention, states."""
LAYOUTS = {2: {"tp": 2, "micro_batch_size": 2}, 4: {"dp_shard": 2, "tp": 2, "micro_batch_size": 1}}


@pytest.mark.parametrize("processes", LAYOUTS)
@pytest.mark.parametrize("family", SPLIT)
def test_a_family_with_split_matrices_learns_what_plain_transformers_does(
    family: str, processes: int, fsdp_ranks: Ranks, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tiny_model(family, initializer_range=0.05).save_pretrained(tmp_path / family)
    data = make_data(3)
    losses, grad_norms, model = train_plainly(tmp_path / family, data)
    found = _train(family, LAYOUTS[processes], data, fsdp_ranks, tmp_path)
    assert found["losses"] == pytest.approx(losses, rel=2e-6)
    assert found["grad_norms"] == pytest.approx(grad_norms, rel=1e-4)
    gradients = load_file(tmp_path / f"{family}.gradients.safetensors")
    for name, gradient in model.first_gradients.items():
        assert (gradients[name] - gradient).abs().max() < 1e-4 * gradient.abs().max() + 1e-8, name


def test_a_plan_that_lacks_a_sum_is_refused(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    """Nemotron has no plan; Qwen3 has one, by which norms of heads whose gradients are not summed would be wrong."""
    torch.manual_seed(0)
    tiny_model("nemotron").save_pretrained(tmp_path / "nemotron")
    with pytest.raises(RuntimeError, match="has no plan of tensor parallelism in Transformers; set `tp: 1`"):
        _train("nemotron", LAYOUTS[2], make_data(1), fsdp_ranks, tmp_path)
    tiny_model("qwen3").save_pretrained(tmp_path / "qwen3")
    with pytest.raises(RuntimeError, match=r"the gradient of model.layers.\d.self_attn.[qk]_norm.weight by"):
        _train("qwen3", LAYOUTS[2], make_data(1), fsdp_ranks, tmp_path, "tests.parity.lost_sum_program")


def test_the_zoo_has_the_families() -> None:
    assert set(SPLIT) <= set(FAMILIES)


def _train(
    family: str,
    layout: dict[str, int],
    data: list[list[list[list[int]]]],
    ranks: Ranks,
    folder: Path,
    program: str = "tests.parity.fsdp_program",
) -> dict[str, list[float]]:
    case = {"model": str(folder / family), "config": make_config(layout)}
    (folder / "spec.json").write_text(
        json.dumps({"data": data, "cases": {family: case}, "output": str(folder / "out")})
    )
    (folder / "out").mkdir(exist_ok=True)
    ranks.run(program, layout["tp"] * layout.get("dp_shard", 1), folder / "spec.json", log=folder / "log.txt")
    (folder / "out" / f"{family}.gradients.safetensors").rename(folder / f"{family}.gradients.safetensors")
    return json.loads((folder / "out" / f"{family}.json").read_text())
