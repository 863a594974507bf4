"""Products by oneDNN: as exact as MKL's, of matrices of any strides, with gradients; torch's own errors elsewhere."""

import subprocess
import sys

import torch

PRODUCTS = """
import torch
from torch import nn
from stages.parallel import cpu_products

def errors():
    torch.manual_seed(0)
    for m, k, n in [(1024, 576, 192), (64, 1536, 16), (1000, 16, 1536), (37, 300, 5000), (1, 1024, 1024)]:
        left, right, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
        exact, into = left.double() @ right.double(), torch.empty(n, m)
        wide = torch.randn(m, 2 * k)
        torch.mm(right.T, left.T, out=into)
        for result, expected in [
            (left @ right, exact),
            (left.T.contiguous().T @ right.T.contiguous().T, exact),
            (into.T, exact),
            (wide[:, ::2] @ right, wide[:, ::2].double() @ right.double()),  # fills no memory
            (torch.addmm(bias, left, right), exact + bias),
            (torch.addmm(bias, left, right, beta=2), exact + 2 * bias),
        ]:
            assert result.dtype == torch.float32
            yield ((result - expected).abs().max() / k**0.5).item()
    layer, inputs = nn.Linear(576, 300), torch.randn(4, 99, 576, requires_grad=True)
    layer(inputs).square().sum().backward()
    gradients = [inputs.grad, layer.weight.grad, layer.bias.grad]
    assert all(one.is_contiguous() for one in gradients)
    exact = inputs.detach().double().requires_grad_()
    layer.double().zero_grad()
    layer(exact).square().sum().backward()
    for one, other in zip(gradients, [exact.grad, layer.weight.grad, layer.bias.grad], strict=True):
        yield ((one - other).abs().max() / other.abs().max()).item()

before = max(errors())
cpu_products.is_mkl_slow = lambda: True
cpu_products.multiply_by_onednn()
cpu_products.multiply_by_onednn()
calls = []
real = cpu_products._product
cpu_products._product = lambda *arguments: calls.append(1) or real(*arguments)
after = max(errors())
assert len(calls) > 25, calls
for dtype in (torch.float64, torch.bfloat16, torch.int64):
    assert (torch.ones(200, 200).to(dtype) @ torch.ones(200, 200).to(dtype) == 200).all()
square = torch.ones(200, 200)
for other in (torch.ones(300, 200), square.double()):
    try:
        square @ other
    except RuntimeError as error:
        print(error)
print(before, after)
"""


def test_products_by_onednn_are_as_exact_as_those_by_mkl() -> None:
    if not torch.backends.mkldnn.is_available():
        return
    done = subprocess.run([sys.executable, "-W", "error", "-c", PRODUCTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shapes, dtypes, errors = done.stdout.splitlines()
    assert "mat1 and mat2 shapes cannot be multiplied" in shapes
    assert "same dtype" in dtypes
    before, after = map(float, errors.split())
    assert after < 2 * before < 1e-5
