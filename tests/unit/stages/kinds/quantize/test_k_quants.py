"""K-quants: made by llama.cpp's library, read by others as they were meant, in the mixes that `llama-quantize` has."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from stages.core.errors import RecipeError, ResourceError
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.gguf_file import StoredTypes, k_quantizer, type_of
from stages.models.linear_layers import Projection
from stages.serving.llama_cpp import engine
from stages.serving.registry import ENGINES

LAYERS = 16
MORE = {0, 1, 4, 7, 10, 13, 14, 15}
"""Layers with more bits among 16: the first and last two, and every third of those between."""


@pytest.mark.parametrize(
    ("mix", "values", "down", "rest"),
    [
        ("q4_k_m", dict.fromkeys(MORE, "Q6_K"), dict.fromkeys(MORE, "Q6_K"), "Q4_K"),
        ("q5_k_m", dict.fromkeys(MORE, "Q6_K"), dict.fromkeys(MORE, "Q6_K"), "Q5_K"),
        ("q4_k_s", dict.fromkeys(range(4), "Q5_K"), dict.fromkeys(range(2), "Q5_K"), "Q4_K"),
        ("q5_k_s", {}, {}, "Q5_K"),
        ("q6_k", {}, {}, "Q6_K"),
    ],
)
def test_what_loses_most_gets_more_bits(mix: str, values: dict, down: dict, rest: str) -> None:
    def of(name: str) -> str:
        return type_of(name, 512, mix, LAYERS, tied=False).name

    assert [of(f"blk.{n}.attn_v.weight") for n in range(LAYERS)] == [values.get(n, rest) for n in range(LAYERS)]
    assert [of(f"blk.{n}.ffn_down.weight") for n in range(LAYERS)] == [down.get(n, rest) for n in range(LAYERS)]
    assert {of(f"blk.3.{name}.weight") for name in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate")} == {rest}
    assert (of("output.weight"), of("token_embd.weight")) == ("Q6_K", rest)
    assert type_of("token_embd.weight", 512, mix, LAYERS, tied=True) == Type.Q6_K


@pytest.mark.parametrize(("mix", "stored"), [("q4_k_m", "Q5_0"), ("q5_k_m", "Q5_1"), ("q6_k", "Q8_0")])
def test_rows_that_no_block_divides_get_the_next_better_type(mix: str, stored: str) -> None:
    assert type_of("blk.3.attn_q.weight", 896, mix, LAYERS, tied=True).name == stored
    assert type_of("token_embd.weight", 896, mix, LAYERS, tied=True) == Type.Q8_0


def test_of_many_that_fell_back_a_few_are_named() -> None:
    found = StoredTypes(tuple((f"blk.{number}.attn_q.weight", 896, "Q5_0") for number in range(99)), "q4_k_m")
    (caveat,) = found.caveats()
    assert caveat.endswith("blk.5.attn_q.weight (896 inputs, Q5_0) and 93 more")
    assert not [*StoredTypes(found.matrices, "q5_0").caveats()], "a mix of no K-quants has what it asks for"
    assert StoredTypes(found.matrices, "q5_0").metrics() == {"num_matrices_q5_0": 99}


@pytest.mark.parametrize(("stored_as", "worst"), [(Type.Q4_K, 0.12), (Type.Q5_K, 0.06), (Type.Q6_K, 0.03)])
def test_another_reader_finds_the_numbers_in_the_blocks(stored_as: Type, worst: float) -> None:
    values = np.random.default_rng(0).normal(size=(37, 512)).astype(np.float32)
    values[5] *= 1000  # each row has scales of its own

    with k_quantizer("q4_k_m") as of_llama_cpp:
        assert of_llama_cpp
        blocks = of_llama_cpp.quantize(values, stored_as)
        again = of_llama_cpp.quantize(values[5:6], stored_as)

    found = gguf.quants.dequantize(blocks, stored_as)
    error = np.sqrt(((found - values) ** 2).mean(1) / (values**2).mean(1))
    assert worst / 4 < error.max() < worst, "as few bits as were asked for, and no fewer"
    assert np.array_equal(again, blocks[5:6]), "whatever is beside it"


def test_a_library_that_fails_is_an_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(
        "stages.kinds.quantize.gguf_file.find_llama_cpp", lambda: engine.LlamaCppProgram(broken, "2026.10")
    )

    with k_quantizer("q6_k") as of_llama_cpp, pytest.raises(ResourceError, match="no such library; make its environ"):
        assert of_llama_cpp
        of_llama_cpp.quantize(np.zeros((4, 256), np.float32), Type.Q6_K)


def test_who_made_the_blocks_is_part_of_the_version() -> None:
    tree = {"kind": "quantize", "model": "sft", "method": "gguf", "calibration": {"dataset": "d"}}
    made, rounded = (QuantizeConfig.model_validate({**tree, "gguf_type": one}) for one in ("q4_k_m", "q8_0"))

    assert made.resolve_outside() == {"llama_cpp_version": engine.find_llama_cpp().version}
    assert rounded.resolve_outside() == {}


def test_a_model_without_a_row_of_whole_blocks_is_refused() -> None:
    tree = {"kind": "quantize", "model": "sft", "method": "gguf", "calibration": {"dataset": "d"}}
    quantization = QuantizeConfig.model_validate({**tree, "gguf_type": "q4_k_m"}).quantization
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    up, down = (
        Projection(f"model.layers.0.mlp.{name}", outputs, inputs)
        for name, inputs, outputs in (("up_proj", 128, 384), ("down_proj", 384, 128))
    )

    with pytest.raises(RecipeError, match=r"blocks of 256 inputs, which divide those of no layer \(128, 384\); say"):
        ENGINES["llama_cpp"].check_loadable(config, [up, down], quantization)
