"""Trainings on rows with videos or sounds, and what is made of their models: shared by the tests of both."""

import json
import shutil

import torch

from flows.cli.data_views import caption, data_page
from stages.core.contract import StageContext
from stages.data import look
from stages.data.config import DataConfig
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.merging import merge
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.run import quantized
from stages.kinds.train import run as training
from stages.models.facts import PROCESSOR_FILES, ModelFacts
from tests.train_stage import make_config, make_context

DATA = {"dataset": "rows", "sequence_length": 320}
QUANTIZED = {"awq": {"group_size": 32}, "gptq": {"group_size": 32}, "int8": {}, "fp8": {}}
"""Options of each method that calibrates."""


def write_rows(data, asked, *columns, split="train"):
    """Write rows of questions, each with its media, and answers that name their column."""
    rows = (
        {"prompt": [{"role": "user", "content": question}], **media}
        | {column: [{"role": "assistant", "content": f"{column} {number}"}] for column in columns}
        for number, (question, media) in enumerate(asked)
    )
    (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses_of(tmp_path, inputs, method="sft", **fields):
    batches = {"global_batch_size": 2, "layout": {"micro_batch_size": 1}}
    config = make_config(method, **{"data": DATA, "steps": 3, "learning_rate": 3e-4, **batches, **fields})
    training.run(config, make_context(tmp_path / "work", inputs, config))
    lines = map(json.loads, (tmp_path / "work" / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["loss"] if "metrics" in line else line["loss"] for line in lines if "loss" in str(line)]


def first_losses(tmp_path, inputs, asked, **fields):
    """Return the first losses of DPO, of distillation from the model itself, and of KTO."""
    rows = inputs["rows"] / "data"
    write_rows(rows, asked, "chosen", "rejected")
    dpo = losses_of(tmp_path / "dpo", inputs, "dpo", steps=1, **fields)[0]
    write_rows(rows, asked, "completion")
    shutil.copytree(tmp_path / "dpo" / "work" / "model", tmp_path / "start" / "model")
    start = {"base": tmp_path / "start", "teacher": tmp_path / "start", "rows": inputs["rows"]}
    distilled = losses_of(tmp_path / "distill", start, "distill", teacher="teacher", steps=1)[0]
    read = map(json.loads, (rows / "train.jsonl").read_text().splitlines())
    labelled = [{**row, "label": number % 2 == 0} for number, row in enumerate(read)]
    (rows / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return dpo, distilled, losses_of(tmp_path / "kto", inputs, "kto", steps=1, **fields)[0]


def shown(tmp_path, inputs, model):
    """Return the captions of the media that `lifecycle data` shows of the first rows, and its page."""
    options = {"rows": "examples", "visits": lambda _: look.Visits([0]), "cache": tmp_path, "scratch": tmp_path}
    found = look.look_at({"rows": inputs["rows"]}, DataConfig.model_validate(DATA), ModelFacts(model), **options)
    media = [one for row in found.rows for document in row.documents for one in document.pictures]
    return sorted(map(caption, media)), data_page(found, "data")


def mean_loss(model, processor, documents):
    """Return the mean negative log-likelihood of the answers' tokens, each document alone.

    documents: prompt, answer and the processor's media of each.
    """
    total, num_tokens = 0.0, 0
    for prompt, answer, media in documents:
        before, whole = (processor(text=[text], return_tensors="pt", **media) for text in (prompt, prompt + answer))
        first = before["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**whole).logits[0].log_softmax(-1)
        learned = whole["input_ids"][0, first:]
        total -= float(logits[first - 1 : -1].gather(1, learned[:, None]).sum())
        num_tokens += len(learned)
    return total / num_tokens


def processor_files(artifact):
    """Return the contents of the files of a processor, by name, in the folder of an artifact's model or adapter."""
    found = {path.name: path.read_bytes() for path in artifact.glob("*/*") if path.name in PROCESSOR_FILES}
    assert found
    return found


def merged_and_quantized(tmp_path, inputs, asked, **fields):
    """Train an adapter, merge it, quantize that; return the metrics of each, none of which may be refused."""
    for split in ("train", "validation"):
        write_rows(inputs["rows"] / "data", asked, "completion", split=split)
    losses_of(tmp_path, inputs, learning_rate=1e-2, adapter={"rank": 4}, **fields)
    calibration = {**DATA, "num_samples": 8, "evaluation_split": "validation"}
    configs = {"merged": MergeConfig.model_validate({"kind": "merge", "model": "base", "adapter": "trained"})}
    configs |= {
        method: QuantizeConfig.model_validate(
            {"kind": "quantize", "model": "merged", "method": method, "calibration": calibration, **options}
        )
        for method, options in QUANTIZED.items()
    }
    folders = inputs | {"trained": tmp_path / "work", "merged": tmp_path / "merged"}
    metrics = {}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        context = StageContext(tmp_path / name, name, "0" * 12, folders, leases={}, cache=tmp_path / "cache")
        metrics[name] = (merge if name == "merged" else quantized)(config, context).metrics
        assert not context.findings
        assert processor_files(tmp_path / name) == processor_files(tmp_path / "work"), name
    return metrics
