"""vLLM serves tiny models of families as Transformers computes them: two rows of the table, all others every night."""

from pathlib import Path

from tests.zoo.proofs import save_to_serve
from tests.zoo.serving import served


def test_models_are_served_one_after_another_or_it_is_said_why_not(tmp_path: Path) -> None:
    outcomes = served({family: save_to_serve(family, tmp_path / family) for family in ("llama", "rwkv")})
    assert outcomes == {
        "llama": "yes",
        "rwkv": "Model architectures ['RwkvForCausalLM'] are not supported for now",
    }
