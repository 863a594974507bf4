"""With FSDP's sharded loading, each process reads only its own rows of the weights, and an error on one fails all."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.models.layers import keep_kinds_of_layers
from tests.parity.ranks import started_ranks
from tests.parity.test_fsdp import make_config

MIB = 2**20
SIZES = {"vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
DAMAGED = "model.layers.1.mlp.up_proj.weight"
FIXED_THRESHOLD_BYTES = "131072"
"""Default of glibc's MALLOC_MMAP_THRESHOLD_; set, it is not adapted.

Otherwise it grows with what is freed, and up to a quarter of the model stays with the allocator, depending on the order
in which the processes free.
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Provide models: one in bf16 of 32 layers in several files, a small one, and one with NaN in a row of rank 1."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    large = Qwen3Config(**SIZES, hidden_size=512, intermediate_size=1536, num_hidden_layers=32)
    Qwen3ForCausalLM(large).to(torch.bfloat16).save_pretrained(folder / "large", max_shard_size="50MB")
    small = Qwen3ForCausalLM(Qwen3Config(**SIZES, hidden_size=64, intermediate_size=96, num_hidden_layers=2))
    small.save_pretrained(folder / "small")
    small.save_pretrained(folder / "damaged")
    path = folder / "damaged" / "model.safetensors"
    weights = load_file(path)
    weights[DAMAGED][-1, 0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return {name: str(folder / name) for name in ("small", "damaged", "large")}  # the first imports what is needed


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """Provide a function that returns what each rank holds at the peak and after loading a model, or its error."""
    output = tmp_path_factory.mktemp("found")
    spec = {"models": models, "config": make_config({"dp_shard": 2}), "output": str(output)}
    (output / "spec.json").write_text(json.dumps(spec))
    with started_ranks(MALLOC_MMAP_THRESHOLD_=FIXED_THRESHOLD_BYTES) as ranks:
        ranks.run("tests.parity.slices_program", 2, output / "spec.json", log=output / "log.txt")
    return lambda name: [json.loads((output / f"{name}.{rank}.json").read_text()) for rank in range(2)]


def test_no_process_holds_the_model(found):
    """No process holds a whole model under FSDP, but its half (417 MiB in fp32) and 2 of 13 layers for the probe.

    Nothing is left of the probe.
    """
    for of_rank in found("large"):
        assert of_rank["shard_bytes"] == pytest.approx(417 / 2 * MIB, rel=0.01)
        assert of_rank["peak_bytes"] < 0.7 * 417 * MIB
        assert of_rank["gathered_bytes"] == 0


def test_all_processes_name_what_is_not_finite_on_one(found):
    for of_rank in found("damaged"):
        assert f"1 weights hold NaN or infinity ({DAMAGED})" in of_rank["error"]


@pytest.mark.parametrize(
    ("layers", "kept"),
    [(["full_attention"] * 6, 2), (["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2, 4)],
)
def test_the_probe_has_every_kind_of_layer(layers, kept):
    config = Qwen3Config(
        **SIZES,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        layer_types=layers,
        use_sliding_window=True,
        sliding_window=4,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    keep_kinds_of_layers(model)
    assert len(model.model.layers) == kept
