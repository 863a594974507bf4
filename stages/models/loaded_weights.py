"""Checks of loaded weights: which hold NaN or infinity, and which stay in fp32 beside half precision.

Transformers says so of each architecture (`_keep_in_fp32_modules`, of those that overflow in fp16, and
`_keep_in_fp32_modules_strict`), or builds them so (LFM2-MoE, Hunyuan-MoE): with a bias rounded to bf16, DeepSeek-V3's
router sends up to a third of the tokens to other experts.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import build_glob_alternation

from stages.core.errors import ModelError

NUM_NAMED = 3


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError, naming the weights, if weights read from `folder` hold NaN or infinity."""
    check_all_finite(folder, sorted(name for name, weight in weights if not torch.isfinite(weight).all()))


def check_all_finite(folder: Path, not_finite: Sequence[str]) -> None:
    """Raise ModelError that names the weights with NaN or infinity, if there are any."""
    if not_finite:
        raise ModelError(
            f"loading {folder}: {len(not_finite)} weights hold NaN or infinity ({', '.join(not_finite[:NUM_NAMED])}); "
            "whatever made this model diverged, or overflowed its dtype: take an earlier one, or fetch it again"
        )


def dtype_of_weights(causal_lm: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return a function from a weight's name to the dtype in which Transformers, asked for `dtype`, loads it."""
    patterns = list(causal_lm._get_dtype_plan(dtype))
    is_listed = build_glob_alternation(patterns)[0].search if patterns else lambda name: None
    is_built_so = _built_in_fp32(causal_lm, dtype)
    return lambda name: torch.float32 if name in is_built_so or is_listed(name) else dtype


def _built_in_fp32(causal_lm: Any, dtype: torch.dtype) -> set[str]:
    """Return the names of weights that the architecture's code creates in fp32, whatever dtype is asked for."""
    if dtype == torch.float32:
        return set()
    own_class: Any = next(one for one in type(causal_lm).__mro__ if one.__module__.startswith("transformers."))
    with torch.device("meta"):
        built = own_class._from_config(copy.deepcopy(causal_lm.config), dtype=dtype)
    return {name for name, weight in built.state_dict().items() if weight.dtype == torch.float32}


def convert_stored_buffers(causal_lm: Any, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Convert the buffers that model files hold to the dtype in which Transformers loads them (`dtype_of_weights`).

    FSDP2 casts parameters alone. MiniMax's decays, in fp32, would make of its states what no matrix in bf16 multiplies.
    """
    stored = causal_lm.state_dict().keys()
    for name, buffer in causal_lm.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype_of(name))


def modules_kept_in_fp32(
    causal_lm: Any, dtype: torch.dtype, dtype_of: Callable[[str], torch.dtype] | None = None
) -> tuple[list[nn.Module], set[str]]:
    """Return the largest modules whose parameters must all be computed in fp32 while others are in `dtype`.

    With them come names of such parameters that share a module with others, as A_log of gated delta rules. dtype_of:
    as of `dtype_of_weights`, if the caller has it; else the model is built on `meta`.
    """
    dtype_of = dtype_of or dtype_of_weights(causal_lm, dtype)
    kept = {name for name, _ in causal_lm.named_parameters() if dtype_of(name) != dtype}
    modules: list[nn.Module] = []
    todo: list[tuple[str, nn.Module]] = [("", causal_lm)] if kept else []
    while todo:
        prefix, module = todo.pop()
        names = {f"{prefix}{name}" for name, _ in module.named_parameters()}
        # A module of nothing but such parameters; else its children are looked at one by one.
        if names and names <= kept:
            modules.append(module)
            kept -= names
        else:
            todo += [(f"{prefix}{name}.", child) for name, child in module.named_children()]
    return modules, kept
