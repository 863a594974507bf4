"""Training a vision-language model on text leaves its vision tower as it was, also in the exported model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from stages.data.batch import Batch, Documents
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOKENS = 24


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_batch(seed: int) -> Batch:
    tokens = torch.randint(0, 100, (1, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    documents = Documents(torch.zeros(1, TOKENS, dtype=torch.int64), 1, [TOKENS])
    return Batch.of(tokens[:, :-1], tokens[:, 1:], torch.arange(TOKENS)[None], documents)


def test_text_trains_a_model_with_a_tower_over_several_micro_batches(one_process: None, tmp_path: Path) -> None:
    """Training a vision-language model on text alone leaves its vision tower unchanged, over several micro-batches.

    In bf16, with gradients accumulated whole, and with weight decay, which would move weights of zero gradient, too.
    """
    torch.manual_seed(0)
    source, trained = tmp_path / "model", tmp_path / "trained"
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=120)
    Gemma3ForConditionalGeneration(config).save_pretrained(source)
    adam = AdamSettings(learning_rate=1e-2, weight_decay=0.1)
    settings = EngineSettings(Layout(accumulate="whole"), "bf16", adam)
    engine = FsdpEngine(ModelFacts(source), settings, torch.device("cpu"))
    losses = [engine.train_step([make_batch(0), make_batch(1)], SftLoss(), 1e-2, 1.0).loss for _ in range(3)]
    assert losses[2] < losses[0]
    engine.export(trained, torch.float32)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, trained))
    assert before.keys() == after.keys()
    of_tower = {name for name in before if "vision_tower" in name or "multi_modal_projector" in name}
    assert len(of_tower) > 30
    assert {name for name in before if torch.equal(before[name], after[name])} == of_tower
