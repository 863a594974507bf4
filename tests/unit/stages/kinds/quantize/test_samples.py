"""Rows for the calibration of a quantization become batches without padding; those with pictures leave towers alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from stages.kinds.quantize.samples import batches
from stages.kinds.quantize.written import problems_beside_text
from tests.zoo import pictures, quantizing

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=9), max_size=20)


@given(rows=ROWS, max_tokens=st.integers(1, 30))
def test_every_row_is_in_one_batch_unpadded_and_batches_are_no_larger_than_asked(rows, max_tokens):
    found = list(batches(rows, max_tokens))
    assert all(given["input_ids"].tolist() == [rows[number] for number in numbers] for numbers, given in found)
    assert sorted(number for numbers, _ in found for number in numbers) == [*range(len(rows))]
    assert all(given["input_ids"].numel() <= max_tokens or len(numbers) == 1 for numbers, given in found)


def test_order_depends_on_the_rows_alone():
    rows = [[1, 2], [3, 4, 5], [6, 7]]
    assert [numbers for numbers, _ in batches(rows, 100)] == [[0, 2], [1]]


def test_a_model_that_sees_is_calibrated_with_pictures_and_its_tower_stays(tmp_path):
    assert quantizing.quantizes("fp8", pictures.save_family("qwen2_5_vl", tmp_path / "seeing")) == "yes"


@pytest.mark.parametrize(
    ("written", "says"), [({"a.weight": 1.0}, None), ({"a.weight": 1.5}, "changed 1 of 1"), ({}, "lost or changed 1")]
)
def test_a_tower_that_is_not_as_it_was_is_an_error(tmp_path, written, says):
    for name, weights, dtype in (("source", {"a.weight": 1.0}, torch.float32), ("target", written, torch.bfloat16)):
        (tmp_path / name).mkdir()
        tensors = {key: torch.full((2, 2), value, dtype=dtype) for key, value in weights.items()}
        save_file({**tensors, "other": torch.ones(1)}, tmp_path / name / "model.safetensors")
    problems = problems_beside_text(tmp_path / "source", tmp_path / "target", {"vision_tower": {"a.weight"}})
    assert [says in str(problem) for problem in problems] == [True] * (says is not None)
