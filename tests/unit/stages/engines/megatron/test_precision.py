"""`precision: fp8` sets Megatron's options, and is refused on devices without fp8."""

import pytest
import torch
from pydantic import ValidationError

from stages.core.errors import ResourceError
from stages.engines.megatron.compat import prepare_megatron
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from tests.train_stage import make_config

prepare_megatron()

from stages.engines.megatron.model import transformer_config  # noqa: E402
from stages.engines.megatron.spec import check_precision  # noqa: E402

CPU = torch.device("cpu")
SHAPE = ModelShape(num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=24, vocab_size=32)


def test_products_are_in_8_bits_everything_else_in_16():
    config = transformer_config(SHAPE, Layout(), "fp8", CPU)
    assert (config.fp8, config.fp8_recipe, config.params_dtype) == ("hybrid", "tensorwise", torch.bfloat16)


def test_other_precisions_do_without():
    assert transformer_config(SHAPE, Layout(), "bf16", CPU).fp8 is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_machine_that_cannot_says_what_is_missing():
    with pytest.raises(ResourceError, match=r"fp8 needs an NVIDIA GPU .* transformer-engine\[pytorch\]"):
        check_precision("fp8")


def test_scales_of_rows_are_refused_with_the_recipe():
    with pytest.raises(ValidationError, match="`fp8_recipe: rowwise` needs `engine: fsdp`, found megatron"):
        make_config(engine="megatron", precision="fp8", fp8_recipe="rowwise")
    assert make_config(engine="fsdp", precision="fp8", fp8_recipe="rowwise").engine_settings.fp8_recipe == "rowwise"
