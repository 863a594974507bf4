"""Calibration samples for quantization are whole documents of any format, truncated to a length."""

import pytest

from stages.core.errors import DataError
from stages.data.calibration import calibration_samples
from stages.kinds.quantize.config import CalibrationConfig
from stages.kinds.quantize.samples import read_samples


def chat(number):
    return {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]}


def test_samples_are_the_first_good_rows_rendered_whole(write_rows, tokenizer_folder, read_ids):
    folder = write_rows([chat(0), {"messages": []}, chat(1), chat(2)])
    samples = calibration_samples(folder, "train", tokenizer_folder, 2, 512, train_on="all")
    assert [read_ids(sample.ids) for sample in samples] == [
        f"<|im_start|>user\nq{number}<|im_end|>\n<|im_start|>assistant\na{number}<|im_end|>\n" for number in (0, 1)
    ]


def test_held_out_samples_are_those_after(write_rows, tokenizer_folder):
    folder = write_rows(map(chat, range(5)))
    both = calibration_samples(folder, "train", tokenizer_folder, 5, 512, train_on="all")
    held_out = calibration_samples(folder, "train", tokenizer_folder, 5, 512, train_on="all", num_skipped=3)
    assert [sample.ids.tolist() for sample in held_out] == [sample.ids.tolist() for sample in both[3:]]


def test_of_a_conversation_only_what_the_assistant_says_may_count(write_rows, tokenizer_folder, read_ids):
    folder = write_rows([chat(7)])
    (sample,) = calibration_samples(folder, "train", tokenizer_folder, 1, 512, train_on="assistant")
    assert read_ids(sample.ids[sample.loss]) == "a7<|im_end|>"
    (sample,) = calibration_samples(folder, "train", tokenizer_folder, 1, 512, train_on="all")
    assert sample.loss.tolist() == [False] + [True] * (len(sample) - 1)


def test_of_a_preference_the_chosen_answer_counts_and_long_ones_are_cut(write_rows, tokenizer_folder, read_ids):
    folder = write_rows([{"prompt": "q ", "chosen": "good", "rejected": "bad"}])
    (sample,) = calibration_samples(folder, "train", tokenizer_folder, 2, 4, train_on="all")
    assert read_ids(sample.ids) == "q go"


def test_no_usable_row_is_an_error(write_rows, tokenizer_folder):
    folder = write_rows([chat(0)])
    with pytest.raises(DataError, match="no usable rows after the first 1 to calibrate with"):
        calibration_samples(folder, "train", tokenizer_folder, 2, 4, train_on="all", num_skipped=1)


def test_bad_rows_are_left_out_and_counted(write_rows, tokenizer_folder):
    folder = write_rows([chat(0), "text", {"messages": []}, *(chat(number) for number in range(1, 20))])
    config = CalibrationConfig(dataset="rows", num_samples=4, num_evaluation_samples=4)
    warnings = []
    samples = read_samples(folder, tokenizer_folder, config, warnings.append)
    assert (len(samples.calibration), len(samples.evaluation)) == (4, 4)
    assert warnings == ["2 bad rows of rows are passed over: train.jsonl:2 is a string, no row"]
