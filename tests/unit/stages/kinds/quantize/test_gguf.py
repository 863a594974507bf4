"""Transformers reads the original model from our GGUF files, K-quants included; unsupported models are refused."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stages.core.contract import StageContext
from stages.core.errors import ModelError, RecipeError, ResourceError
from stages.hubs.builtin import qwen3
from stages.kinds.quantize.check import check_headers
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.divergence import _load, measure_divergence
from stages.kinds.quantize.gguf_file import StoredTypes, k_quantizer, quantize, type_of
from stages.kinds.quantize.gguf_tokenizer import SPLITS, splitting_of
from stages.kinds.quantize.registry import QuantizationJob
from stages.kinds.quantize.run import run
from stages.models.facts import ModelFacts
from stages.models.linear_layers import Projection
from stages.models.model_folder import GGUF_FILE, check_model_folder
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.llama_cpp import engine
from stages.serving.registry import ENGINES, check_weight_files, new_launch_spec
from stages.serving.server import started_server

SIZES = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA_3, tie_word_embeddings=True)),
}
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
"""Model sizes with matrix rows whose length is a multiple of a K-quant block (256)."""
SPLIT_BY = {"qwen2": "qwen2", "llama3": "llama-bpe"}
"""Names of GGUF pre-tokenizers by test model; models without a name use a pre-tokenizer that only splits digits."""
ROWS = [[19, 20, 273, 21, 22, 33, 75, 40, 260, 5], [61, 1, 75, 76, 2, 100, 45]]
TEXTS = ["What is 12 + 34?", "<|im_start|>user\n7 + 105 = 112<|im_end|>", "Übung, naïve 数 🙂 12,345.67"]
LAYERS = 16
MORE = {0, 1, 4, 7, 10, 13, 14, 15}
"""Layers, of 16, with Q6_K in Q4_K_M: the first two, the last two, and every third between."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("builtin")
    qwen3.make(folder)
    return folder


def split_by(path: Path, name: str) -> None:
    whole = json.loads(path.read_text())
    pattern = next(pattern for pattern, known in SPLITS.items() if known == name)
    whole["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    path.write_text(json.dumps(whole))


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path):
    def model(name: str) -> Path:
        torch.manual_seed(0)
        sizes = {**WIDE, "intermediate_size": 384, "head_dim": 64} if name == "uneven" else {**WIDE, "head_dim": 32}
        made = MODELS[name]() if name in MODELS else Qwen3ForCausalLM(Qwen3Config(**sizes))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:  # norms and biases are ones and zeros otherwise, in any order the same
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        folder = tmp_path / name
        made.save_pretrained(folder)
        for path in tokenizer.iterdir():
            if "token" in path.name or path.suffix == ".jinja":
                shutil.copy(path, folder)
        if name in SPLIT_BY:
            split_by(folder / "tokenizer.json", SPLIT_BY[name])
        return folder

    return model


def config(gguf_type: str = "f16", **fields) -> QuantizeConfig:
    tree = {"kind": "quantize", "model": "sft", "method": "gguf", "calibration": {"dataset": "d"}}
    return QuantizeConfig.model_validate({**tree, "gguf_type": gguf_type, **fields})


def write(source: Path, gguf_type: str, samples: list[list[int]] = ROWS, **fields) -> Path:
    target = source.with_name(f"{source.name}-{gguf_type}")
    options = config(gguf_type, **fields).quantization
    job = QuantizationJob(source, target, options, samples, seed=0, trust_remote_code=False, report=lambda *_: None)
    for problem in quantize(job):
        raise problem
    return target


def kl(source: Path, target: Path) -> float:
    rows = [list(range(3, 60)), *ROWS]
    everything = [[True] * len(row) for row in rows]
    found = measure_divergence(source, target, rows, everything, trust_remote_code=False, report=lambda *_: None)
    return found.metrics()["kl_nats_per_token"]


@torch.inference_mode()
def log_probabilities(folder: Path, row: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, computed by Transformers from a GGUF file."""
    logits = _load(folder, trust_remote_code=False)(torch.tensor([row])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()


def apart(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_model(make, name: str) -> None:
    source = make(name)
    target = write(source, "f16", [AutoTokenizer.from_pretrained(source)(text)["input_ids"] for text in TEXTS])

    assert check_model_folder(ModelFacts(target)) == []
    assert kl(source, target) < 1e-5
    assert {one.tensor_type.name for one in gguf.GGUFReader(target / GGUF_FILE).tensors} == {"F16", "F32"}


def test_fewer_bits_lose_more(make, tokenizer: Path) -> None:
    source = make("qwen3")
    losses = {gguf_type: kl(source, write(source, gguf_type)) for gguf_type in ("f16", "q8_0", "q5_0", "q4_0")}

    assert losses["f16"] < losses["q8_0"] < losses["q5_0"] < losses["q4_0"]
    sizes = {gguf_type: (source.with_name(f"qwen3-{gguf_type}") / GGUF_FILE).stat().st_size for gguf_type in losses}
    assert sizes["f16"] > sizes["q8_0"] > sizes["q5_0"] > sizes["q4_0"]


def test_the_stage_tells_which_matrices_have_another_type_than_was_asked_for(make, tmp_path: Path) -> None:
    """A GGUF stage reports which matrices got another type, because their rows do not fit the requested one.

    Here two output projections have 384 inputs: one was to get Q4_K, the other Q6_K, which need multiples of 256.
    """
    made = make("uneven")
    (tmp_path / "sft").mkdir()
    made.rename(tmp_path / "sft" / "model")
    (tmp_path / "d" / "data").mkdir(parents=True)
    rows = (json.dumps({"prompt": f"What is {n} + 2?", "completion": str(n + 2)}) + "\n" for n in range(400))
    (tmp_path / "d" / "data" / "train.jsonl").write_text("".join(rows))
    work = tmp_path / "work"
    work.mkdir()
    inputs = {"sft": tmp_path / "sft", "d": tmp_path / "d"}
    result = run(config("q4_k_m"), StageContext(work, "small", "0" * 12, inputs, {}, tmp_path / "cache"))

    counts = {name: count for name, count in result.metrics.items() if name.startswith("num_matrices")}
    types = [one.tensor_type.name for one in gguf.GGUFReader(work / "model" / GGUF_FILE).tensors if len(one.shape) > 1]
    expected = {f"num_matrices_{name.lower()}": types.count(name) for name in ("F16", "Q4_K", "Q5_0", "Q6_K", "Q8_0")}
    assert counts == {**expected, "num_matrices_of_smaller_blocks": 2}
    assert (expected["num_matrices_q5_0"], expected["num_matrices_q8_0"]) == (1, 1)
    said = [json.loads(line) for line in (work / "events.jsonl").read_text().splitlines()]
    (warning,) = [one["message"] for one in said if "larger type" in one["message"]]
    assert warning == (
        "2 of 16 matrices have rows that blocks of 256 do not divide, and are stored in a larger type with blocks of "
        "32: blk.0.ffn_down.weight (384 inputs, Q5_0), blk.1.ffn_down.weight (384 inputs, Q8_0)"
    )
    assert "stored as 1 F16, 12 Q4_K, 1 Q5_0, 1 Q6_K, 1 Q8_0" in [one["message"] for one in said]


def test_llama_cpp_computes_with_the_k_quants_that_transformers_reads(make, tmp_path: Path) -> None:
    source = make("wide")
    target = write(source, "q4_k_m")

    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(target / GGUF_FILE).tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_down.weight"]) == ("Q4_K", "Q6_K")
    spec = new_launch_spec(target, "model", ServingConfig(engine="llama_cpp", max_model_len=256, max_num_seqs=1))
    with started_server(spec, ServeExecution(), tmp_path / "server.log", tmp_path / "server") as server:
        server.wait_until_ready(ServeExecution().ready_timeout_s)
        served = server.engine.predictions(server.client, ROWS[:1])[0].log_probabilities
    original, read = (log_probabilities(folder, ROWS[0]) for folder in (source, target))
    # llama.cpp also rounds activations to 8 bits.
    assert 0 < apart(served, read) < apart(original, read) / 2


def test_embeddings_are_stored_as_the_layers_and_what_is_ignored_is_not(make) -> None:
    target = write(make("llama"), "q8_0", ignore=["lm_head", "re:.*down_proj"])

    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(target / GGUF_FILE).tensors}
    assert (types["token_embd.weight"], types["output.weight"], types["output_norm.weight"]) == ("Q8_0", "F16", "F32")
    assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_up.weight"]) == ("F16", "Q8_0")


def test_llama_3_stretches_its_frequencies_in_the_file(make) -> None:
    found = {one.name: one for one in gguf.GGUFReader(write(make("llama3"), "f16") / GGUF_FILE).tensors}
    factors = found["rope_freqs.weight"].data

    assert factors.shape == (8,)
    assert factors[0] == pytest.approx(1) and factors[-1] == pytest.approx(8), "the slowest, by the whole factor"


def test_llama_cpp_must_cut_rows_into_the_same_tokens(make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make("qwen3")
    rows = [AutoTokenizer.from_pretrained(source)(text)["input_ids"] for text in TEXTS]
    write(source, "f16", rows)

    monkeypatch.setattr("stages.kinds.quantize.gguf_tokenizer.SPLITS", {r"\d": "qwen2"})
    with pytest.raises(ModelError, match=r"cuts a row into other tokens .* they differ from token \d+ on"):
        write(source, "q8_0", rows)


def test_what_was_written_says_that_it_is_quantized(make) -> None:
    source = make("qwen3")
    target = write(source, "q4_0")

    assert json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"
    assert {path.name for path in source.iterdir()} - {"model.safetensors"} <= {path.name for path in target.iterdir()}
    with pytest.raises(ModelError, match=r"holds gguf, and vLLM serves safetensors; say `engine: llama_cpp`"):
        check_weight_files(target, ENGINES["vllm"])
    with pytest.raises(ModelError, match=r"holds safetensors, and llama.cpp serves gguf; make one of it"):
        check_weight_files(source, ENGINES["llama_cpp"])


def test_a_file_that_is_cut_off_or_none_is_refused(make) -> None:
    target = write(make("qwen3"), "f16")
    (target / GGUF_FILE).write_bytes(b"<html>")

    with pytest.raises(ModelError, match="it is no GGUF file"):
        check_model_folder(ModelFacts(target))


@pytest.mark.parametrize(
    ("gguf_type", "said"),
    [("q2_k", "need an importance matrix"), ("iq2_xs", "need an importance matrix"), ("q9", "Input should be")],
)
def test_types_that_nobody_makes_are_refused(gguf_type: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(gguf_type)


def test_a_type_is_asked_for_and_is_of_this_method_alone() -> None:
    with pytest.raises(ValidationError, match="`method: gguf` needs `gguf_type`, one of f16, q8_0"):
        config(gguf_type=None)
    with pytest.raises(ValidationError, match="`method: awq` has no use for `gguf_type`"):
        config("q8_0", method="awq")
    assert dict(config().idle_fields()).keys() >= {"seed", "tensor_parallel_size"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gemma3_text"}, "its model_type is gemma3_text; expected llama or qwen2 or qwen3"),
        (
            {"architectures": ["Qwen3ForTokenClassification"]},
            "it is a Qwen3ForTokenClassification; expected a language",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary embedding is of type yarn"),
        ({"use_sliding_window": True}, "sliding window"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(make, changed: dict, said: str) -> None:
    source = make("qwen3")
    whole = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**whole, **changed}))

    with pytest.raises(RecipeError, match=said):
        check_headers(source, config())


def test_rows_that_no_block_divides_are_refused_but_in_f16(make) -> None:
    source = make("qwen3")
    model = AutoModelForCausalLM.from_pretrained(source)
    sizes = {**SIZES, "intermediate_size": 100}
    type(model)(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)).save_pretrained(source)

    with pytest.raises(RecipeError, match=r"q8_0 has a scale for every 32 inputs, .*down_proj \(100\)"):
        check_headers(source, config("q8_0"))
    check_headers(source, config("f16"))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, "splits text by Metaspace"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\s+"}}, {"type": "ByteLevel", "use_regex": False}]}}, r"\\s\+"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is Lowercase"),
        ({"model": {"type": "Unigram"}}, "its model is Unigram"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(tokenizer: Path, tmp_path: Path, part, said) -> None:
    whole = json.loads((tokenizer / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, **part}))

    with pytest.raises(ModelError, match=said):
        splitting_of(tmp_path)


def test_byte_level_tokenizers_are_known_by_how_they_split(tokenizer: Path, tmp_path: Path) -> None:
    whole = json.loads((tokenizer / "tokenizer.json").read_text())
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, "pre_tokenizer": pre_tokenizer}))

    assert (splitting_of(tokenizer), splitting_of(tmp_path)) == ("superbpe", "gpt-2")


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
        ENGINES["llama_cpp"].check_loadable(ModelFacts(config), [up, down], quantization)
