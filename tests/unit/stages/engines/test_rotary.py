"""Rotary embeddings of packed documents equal those of each one alone, also with length-dependent frequencies."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines import rotary
from stages.engines.fsdp import model as fsdp_model
from stages.engines.fsdp.model import load_model
from tests.parity.fsdp_program import pack

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF_WIDTH = 4
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * HALF_WIDTH,
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "longrope": lambda: Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=32),
    "dynamic NTK": lambda: LlamaConfig(
        **{**SIZES, "max_position_embeddings": 32},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "fixed": lambda: LlamaConfig(**SIZES),
}
DOCUMENTS = [20, 60, 7, 40, 33]
"""Document lengths in tokens; the models treat more than 32 tokens as long."""


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]()).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def packed_documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in DOCUMENTS]


def loaded(folder: Path) -> fsdp_model.TargetLogProbabilities:
    return load_model(folder, reads_weights=True, trust_remote_code=False)


@torch.no_grad()
def alone(folder: Path, document: list[int]) -> Tensor:
    """Return the log-likelihood of a document, computed by a new Transformers model that has seen no other document."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([document])
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum()


@torch.no_grad()
def test_packed_documents_get_the_loss_that_transformers_gives_each_alone(folder: Path) -> None:
    documents = packed_documents()
    batch: Batch = pack([documents])
    found = batch.documents.sums(loaded(folder)(batch))
    torch.testing.assert_close(found, torch.stack([alone(folder, document) for document in documents]))


@pytest.mark.parametrize("folder", ["longrope", "dynamic NTK"], indirect=True)
def test_the_probe_at_load_finds_frequencies_that_are_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_model, "rotate_by_document", lambda decoder: None)
    with pytest.raises(ModelError, match="other log-probabilities to packed documents than to each alone"):
        loaded(folder)


def test_the_probe_leaves_config_and_frequencies_as_they_were(folder: Path) -> None:
    untouched = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    probed = loaded(folder).causal_lm
    assert probed.config.rope_parameters == untouched.config.rope_parameters
    assert probed.config.max_position_embeddings == untouched.config.max_position_embeddings
    expected = dict(untouched.named_buffers())
    for name, buffer in probed.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_model_of_fixed_frequencies_is_left_alone() -> None:
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(CONFIGS["fixed"]()).base_model
    rotary.rotate_by_document(decoder)
    assert "forward" not in vars(decoder.rotary_emb)
