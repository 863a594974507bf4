"""Cache keys may not change, so that a new release of this software reuses tokenized data in existing caches.

If the cached result of the same input changes, change a version or a field among the parts of its key, and let
`python -m tests.unit.stages.kinds.train.test_cache_keys` write `frozen_cache_keys.json` again.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.core.cache import content_key, file_digest
from stages.data.config import DataConfig
from stages.data.files import is_held_out, portions
from stages.data.mixture import MixedDataset
from stages.data.prepare import prepare_portion
from stages.data.tokenized_rows import parts_of
from stages.data.tokenizing import key_parts
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.registry import METHODS
from stages.kinds.train.reference import ReferenceModel, model_digest
from stages.kinds.train.teacher import ServedTeacher, TeacherModel, _path

FROZEN = Path(__file__).with_name("frozen_cache_keys.json")
LIBRARIES = {"tokenizers": "1", "transformers": "1", "numpy": "1"}
TOKENIZER = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("model.safetensors", "generation_config.json"),
)
DATA = {
    "plain": {},
    "text": {"format": "text", "packing": "cut", "sequence_length": 512},
    "columns": {"columns": {"prompt": "question", "completion": "answer"}, "train_on": "all"},
    "whole rows": {"packing": False, "over_long": "truncate", "on_bad_rows": "drop", "max_bad_row_fraction": 0.25},
    "dated template": {"template_date": "2026-02-03", "chat_template": "template.jinja"},
    "held out": {"evaluation_fraction": 0.1, "turns": "separately"},
    "own split": {"evaluation_split": "validation", "special_tokens_in_content": "refuse"},
}
DISTILLATION = {
    **{"kind": "train", "model": "base", "data": {"dataset": "rows"}, "global_batch_size": 8, "learning_rate": 1e-4},
    **{"method": "distill", "distill": {"teacher_server": {"url": "http://host/v1", "served_model": "wise"}}},
}
METHOD_OPTIONS = {"dpo": {"ld_alpha": 0.5}, "orpo": {}}


class StoppedError(Exception):
    """Error raised to end a function as soon as its cache key is known."""


class NoChange(str):
    """Fake batch transformation that changes nothing, and has the name of a real one for the cache key."""

    __slots__ = ()

    def __repr__(self):
        return str(self)

    def __call__(self, batch):
        return batch


def stop(*arguments, **options):
    raise StoppedError(arguments)


def data_keys(folder):
    """Yield name and cache key of each dataset's tokenized training and held-out rows."""
    model = folder / "model"
    model.mkdir()
    for name in TOKENIZER:
        (model / name).write_text(f"{name}\n")
    (folder / "template.jinja").write_text("{{ messages }}")
    for name, fields in DATA.items():
        template = {"chat_template": folder / "template.jinja"} if "chat_template" in fields else {}
        config = DataConfig.model_validate({"dataset": "rows", **fields, **template})
        for rows in ("examples", "pairs", "labelled"):
            for portion in portions(config):
                parts = key_parts(portion, config, model, rows)
                assert parts["libraries"].keys() == LIBRARIES.keys()
                yield f"data: {name}, {rows}, {portion.name}", content_key({**parts, "libraries": LIBRARIES})


def prepared_key(folder):
    """Return the cache key of a dataset's tokenized rows as training computes it, and the expected one."""
    config = DataConfig.model_validate({"dataset": "rows"})
    (portion,) = portions(config)
    file = folder / "train.jsonl"
    file.write_text('{"text": "a"}\n')
    found = []
    task = SimpleNamespace(
        **{"portion": portion, "folder": folder, "files": [file], "config": config, "rows": "examples", "media": None},
        **{
            "model": SimpleNamespace(folder=folder / "model"),
            "run": lambda target: (found.append(target.name), stop()),
        },
    )
    with pytest.raises(StoppedError):
        prepare_portion(task, folder / "tokenized")
    parts = key_parts(portion, config, folder / "model", "examples")
    expected = content_key({**parts, "files": {"train.jsonl": file_digest(file)}})
    return found, [f".{expected}.partial"]


def reference_keys(folder):
    """Yield the cache key of reference log-probabilities for each way in which a training method alters batches."""
    engine = SimpleNamespace(
        **{"compute_dtype": torch.bfloat16, "data_rank": 0, "data_parallel_size": 1},
        **{"broadcast_from_rank0": lambda value: value, "document_log_probabilities": lambda batch: torch.zeros(4)},
        **{"sum_over_data": lambda values: values},
    )
    dataset = SimpleNamespace(
        **{
            "key": "0123456789abcdef",
            "row_documents": lambda rows: np.repeat(np.array(rows) * 2, 2) + [0, 1] * len(rows),
        },
        **{"batch": lambda rows, size: "batch", "mismatched": lambda rows, size: "batch"},
    )
    changes = {"none": None}
    for name, options in METHOD_OPTIONS.items():
        method = METHODS[name]
        changes[name] = method.batch_change(method.options.model_validate(options))
    for name, change in changes.items():
        for mismatched in (False, True):
            here = folder / f"{name} {mismatched}"
            context = SimpleNamespace(cache=here, progress=lambda *_: None)
            model = ReferenceModel(engine, "f" * 32, 2, context, SimpleNamespace(begins=lambda _: None))
            model.rows(dataset, [0, 3], NoChange(repr(change)) if change else None, mismatched=mismatched)
            (file,) = (here / "reference").glob("*.npy")
            yield f"reference: {name}{', mismatched' * mismatched}", file.stem
        if change:
            yield f"change: {name}", repr(change)


def teacher_keys(folder):
    config = TrainConfig.model_validate(DISTILLATION)
    asked, dataset = config.teacher_tokens, SimpleNamespace(key="0123456789abcdef")
    teachers = {
        "server": ServedTeacher.of(asked, config.execution),
        "model": TeacherModel("f" * 32, asked, "bf16", 2, stop),
    }
    for name, teacher in teachers.items():
        yield f"teacher: {name}", str(_path(teacher, asked, dataset, [0, 3, 4], folder).relative_to(folder))


def keys(folder):
    """Return the cache key of everything that a training caches, by name."""
    found = dict(data_keys(folder))
    found |= dict(reference_keys(folder)) | dict(teacher_keys(folder))
    adapter = folder / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text(f"{name}\n")
    found["model"] = model_digest(folder / "model", adapter)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(40)))
    found["part of a file"] = [part.digest for part in parts_of(rows, "rows.jsonl")]
    held_out = [number for number in range(100) if is_held_out({"text": str(number), "é": 0.5}, 0.2)]
    found["rows that are held out"] = held_out
    mixed = object.__new__(MixedDataset)
    mixed._list = [SimpleNamespace(key="0123"), SimpleNamespace(key="4567")]
    found["mixture"] = mixed.key
    return found


def test_keys_of_caches_are_the_frozen_ones(tmp_path):
    assert keys(tmp_path) == json.loads(FROZEN.read_text())


def test_a_prepared_dataset_is_kept_under_the_key_of_its_parts_and_files(tmp_path):
    dict(data_keys(tmp_path))
    found, expected = prepared_key(tmp_path)
    assert found == expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        FROZEN.write_text(json.dumps(keys(Path(name)), indent=1) + "\n")
