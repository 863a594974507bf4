"""Products of fp32 matrices by oneDNN on CPUs where the Math Kernel Library (MKL), which torch uses, is slow.

MKL (2024.2, in torch 2.13) has AVX-512 kernels for Intel's processors alone, and multiplies with AVX2 on others.
oneDNN, which torch uses for bf16, has them for all: on one core of an AMD EPYC of Zen 5 some 240 GFLOP/s instead of
105. Both multiply and add in fp32; only the order of sums differs.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS_AT_A_TIME = 4096
"""Number of rows of a product to compute at a time where its memory is there already: oneDNN's operation makes new."""
LEAST_MULTIPLICATIONS = 2**20
"""Number of multiplications from which a product goes to oneDNN; the call alone costs more than a smaller one takes."""

_overridden: list[torch.library.Library] = []


def multiply_by_onednn() -> None:
    """Let oneDNN multiply fp32 matrices of CPUs in this process from now on, in backward passes too, if MKL is slow."""
    if _overridden or not is_mkl_slow():
        return
    library = torch.library.Library("aten", "IMPL")
    _overridden.append(library)  # torch takes the kernels back when it is deleted
    # Not `nn.Linear`: heads, adapters, experts, Megatron's layers and all backward passes end in these three.
    for name, kernel in (("mm", _multiply), ("mm.out", _multiply_into), ("addmm", _multiply_and_add)):
        own = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of an overridden kernel, whatever is asked for
            library.impl(name, partial(kernel, own), "CPU", with_keyset=True)


def is_mkl_slow() -> bool:
    """Return whether MKL leaves this processor's AVX-512 unused, and oneDNN is there to use it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    vendor = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), None)
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and vendor not in (None, "GenuineIntel") and torch.backends.mkldnn.is_available()


def _multiply(own: Any, keys: Any, left: Tensor, right: Tensor) -> Tensor:
    return _product(left, right) if _are_for_onednn(left, right) else own.call_boxed(keys, left, right)


def _multiply_into(own: Any, keys: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    if not _are_for_onednn(left, right) or out.dtype != left.dtype or out.shape != (len(left), right.shape[1]):
        return own.call_boxed(keys, left, right, out=out)
    for part, rows in zip(out.split(ROWS_AT_A_TIME), left.split(ROWS_AT_A_TIME), strict=True):
        part.copy_(_product(rows, right))
    return out


def _multiply_and_add(
    own: Any, keys: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    is_bias = bias.shape == right.shape[1:] and bias.dtype == left.dtype and beta == alpha == 1
    if not is_bias or not _are_for_onednn(left, right):
        return own.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha)
    return _product(left, right, bias)


def _are_for_onednn(left: Tensor, right: Tensor) -> bool:
    """Return whether two matrices are fp32, fit and are large; torch's own kernel raises the errors for others."""
    is_fp32 = left.dtype == right.dtype == torch.float32
    fit = left.ndim == right.ndim == 2 and left.shape[1] == len(right)
    return is_fp32 and fit and left.numel() * right.shape[1] >= LEAST_MULTIPLICATIONS


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left × right (+ bias), contiguous, of fp32 matrices [m, k] and [k, n] of any strides."""
    multiply = torch.ops.mkldnn._linear_pointwise.default  # what Inductor calls: input × weightᵀ of dense tensors
    left, right = _without_gaps(left), _without_gaps(right)
    if bias is None and not left.is_contiguous() and left.numel() > right.numel():
        # It copies an input that is not contiguous. Of a gradient of weights, gradientᵀ × input, that is the gradient:
        # the transposed product's input is smaller, and of an adapter's B so is the result that is transposed back.
        return multiply(right.t(), left, None, "none", [], "").t().contiguous()
    return multiply(left, right.t(), bias, "none", [], "")


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return the matrix, copied unless it fills its memory: oneDNN would multiply it a hundred times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()
