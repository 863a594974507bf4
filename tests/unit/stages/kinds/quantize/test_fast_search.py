"""AWQ's search uses the CPU's fast, less precise matrix products; all other code uses full precision."""

import pytest
import torch

from stages.kinds.quantize.llm_compressor import _fast_search
from stages.serving.engine import Quantization


@pytest.mark.skipif(torch.accelerator.is_available(), reason="on an accelerator nothing is changed")
@pytest.mark.parametrize(("method", "precision"), [("awq", "medium"), ("gptq", "highest"), ("int8", "highest")])
def test_only_the_search_of_awq_takes_fast_products(method, precision) -> None:
    quantization = Quantization(
        method=method, weights="int4", group_size=32, symmetric=False, ignore=(), tensor_parallel_size=1
    )
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="the search failed"), _fast_search(quantization):
        assert torch.get_float32_matmul_precision() == precision
        raise RuntimeError("the search failed")
    assert torch.get_float32_matmul_precision() == before
