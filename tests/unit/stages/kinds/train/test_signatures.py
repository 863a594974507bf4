"""Functions of training and engines take at most five positional arguments, so that calls name the others."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[5]
MOST = 5
DICTATED = {
    "attention.py:packed_attention",  # Transformers' attention interface
    "attention_kernels.py:_padded_operation",  # an operation of torch, which keeps its arguments by their places
    "attention_kernels.py:_padded_backward",
    "attention.py:__init__",  # Megatron's core attention
    "attention.py:forward",
    "log_probabilities.py:forward",  # torch.autograd.Function
    "log_probabilities.py:_output_gradient",  # the same values, in its backward pass
}


def test_no_function_takes_many_positions() -> None:
    found = set()
    for room in ("stages/kinds/train", "stages/engines"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    positions = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
                    if len([one for one in positions if one not in ("self", "cls", "ctx")]) > MOST:
                        found.add(f"{file.name}:{node.name}")
    still = {"_build_engine", "engine_errors"}
    assert {one for one in found if one.partition(":")[2] not in still} <= DICTATED, (
        "give these arguments by keyword, or as an object with names"
    )
