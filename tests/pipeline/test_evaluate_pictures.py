"""Questions with pictures, asked by the real lm-eval of the real vLLM, are answered as Transformers answers them."""

import base64
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from stages.data.media.images import decode_picture
from stages.harnesses.scores import read_samples
from stages.hubs.builtin import qwen3_vl
from tests.serving import SERVING, run_to_the_end, write_work
from tests.unit.stages.data.media.conftest import encoded, noise

TASK = """
task: seen
dataset_path: json
dataset_kwargs: {data_files: {test: seen.jsonl}}
test_split: test
doc_to_image: [images]
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: 6, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = ("Which <image> is it?", "And these: <image> or <image>?", "No place for it?")


@pytest.mark.nightly
def test_pictures_are_seen_by_vllm_as_by_transformers(tmp_path: Path) -> None:
    model, tasks = tmp_path / "sft" / "model", tmp_path / "tasks"
    qwen3_vl.make(model)
    tasks.mkdir()
    processor, reference = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model)
    rows = []
    for number, question in enumerate(QUESTIONS):
        files = [encoded(noise((64 + 16 * number, 48), one)) for one in range(max(1, question.count("<image>")))]
        pieces = question.split("<image>")
        parts = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": piece}]
        if len(pieces) == 1:
            parts.insert(0, {"type": "image"})
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        given = processor(text=[text], images=[*map(decode_picture, files)], return_tensors="pt")
        with torch.no_grad():
            ids = reference.generate(**given, max_new_tokens=6, do_sample=False)[0, given["input_ids"].shape[1] :]
        addresses = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in files]
        answer = processor.tokenizer.decode(ids, skip_special_tokens=True)
        rows.append({"question": question, "images": addresses, "answer": answer})
    (tasks / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "seen.yaml").write_text(TASK)
    config = {
        "model": "sft",
        "serving": {**SERVING, "max_model_len": 512},
        "tasks": ["seen"],
        "task_folder": str(tasks),
    }
    work = write_work(tmp_path / "scores", "evaluate", {**config, "apply_chat_template": True}, {"sft": model.parent})
    result = run_to_the_end(work)
    samples = read_samples(work, "seen")
    assert [sample["resps"][0][0] for sample in samples] == [row["answer"] for row in rows]
    assert result.metrics["seen.exact_match"] == 1
    assert "other tokens" not in (work / "events.jsonl").read_text()
    assert [one["path"] for one in samples[1]["media"]] == ["seen.jsonl#2"] * 2
    assert "base64" not in json.dumps(samples)
