"""Trainings on rows with videos have the loss that Transformers computes on the frames that its processor takes."""

import io
import json
import math
import shutil
import sys
import time

import av
import numpy as np
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

from stages.core.errors import DataError, ModelError
from stages.data.media import videos
from stages.hubs.builtin import qwen3_vl
from stages.kinds.train import run as training
from stages.models.media import MediaError
from tests.train_stage import make_config, make_context
from tests.unit.stages.data.media.conftest import byte_tokenizer, encoded, noise, repeated_frame, video
from tests.zoo.models import tiny_model
from tests.zoo.processors import QWEN_SIZE

SPECIAL = ["<pad>", "</s>", "<|im_start|>", "<|im_end|>", qwen3_vl.START, qwen3_vl.END]
IMAGE, VIDEO = qwen3_vl.IMAGE, qwen3_vl.VIDEO
TEMPLATE = qwen3_vl.CHAT_TEMPLATE.replace("part['type'] == 'image'", "part['type'] != 'text'").replace(
    IMAGE, "<|' + part['type'] + '_pad|>"
)
"""The builtin model's chat template with a place for videos, which it has none for."""
FILES = {"a.mp4": video(), "b.avi": video((48, 80), 33, 12, 1, "avi"), "c.webm": video((40, 40), 9, 3, 2, "matroska")}
OTHER_FILES = {
    "a.mp4": video(seed=3),
    "b.avi": video((48, 80), 33, 12, 4, "avi"),
    "c.webm": video((40, 40), 9, 3, 5, "matroska"),
}
ASKED = (
    ("<video>what?", {"videos": ["a.mp4"]}),
    ("text alone?", {}),
    ("a <image> and <video>?", {"images": ["a.png"], "videos": ["b.avi"]}),
    ("<video>then<video>?", {"videos": ["c.webm", "a.mp4"]}),
)
"""Questions of the rows, with their media."""
SAMPLING = {"fps": 4.0, "max_frames": 8}


@pytest.fixture
def inputs(tmp_path):
    model, data = tmp_path / "base" / "model", tmp_path / "rows" / "data"
    for folder in (model, data):
        folder.mkdir(parents=True)
    fast = byte_tokenizer([*SPECIAL, IMAGE, VIDEO], image_token=IMAGE, video_token=VIDEO)
    images, videos = (
        made(**QWEN_SIZE) for made in (transformers.Qwen2VLImageProcessor, transformers.Qwen2VLVideoProcessor)
    )
    transformers.Qwen2_5_VLProcessor(images, fast, videos, chat_template=TEMPLATE).save_pretrained(model)
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": SPECIAL[4]}
    ids = {name: fast.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {"vocab_size": len(fast), "pad_token_id": fast.pad_token_id}
    config = tiny_model("qwen2_5_vl").config.to_dict()
    tiny_model("qwen2_5_vl", text_config=config["text_config"] | text, **ids).save_pretrained(model)
    for name, content in {**FILES, "a.png": encoded(noise((40, 24)))}.items():
        (data / name).write_bytes(content)
    return {"base": tmp_path / "base", "rows": tmp_path / "rows"}


def write_rows(data, *columns):
    rows = (
        {"prompt": [{"role": "user", "content": asked}], **media}
        | {column: [{"role": "assistant", "content": f"{column} {number}"}] for column in columns}
        for number, (asked, media) in enumerate(ASKED)
    )
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses_of(tmp_path, inputs, method, **fields):
    batches = {"global_batch_size": 2, "layout": {"micro_batch_size": 1}}
    data = {"dataset": "rows", "sequence_length": 320}
    config = make_config(
        method, **{"data": data, "steps": 3, "learning_rate": 3e-4, "media": SAMPLING, **batches, **fields}
    )
    training.run(config, make_context(tmp_path / "work", inputs, config))
    lines = map(json.loads, (tmp_path / "work" / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["loss"] if "metrics" in line else line["loss"] for line in lines if "loss" in str(line)]


def whole_video(content):
    """Return all frames of a video, uint8 [frames, height, width, 3], and what Transformers asks about it."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = np.stack([one.to_ndarray(format="rgb24") for one in container.decode(stream)])
    return frames, VideoMetadata(total_num_frames=len(frames), fps=float(stream.average_rate))


def loss_of_transformers(folder, exported, column, files=FILES):
    """Return the mean negative log-likelihood of the answers' tokens, each row alone. exported: with the processor."""
    processor = transformers.AutoProcessor.from_pretrained(exported)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    total, num_tokens = 0.0, 0
    for number, (asked, media) in enumerate(ASKED):
        options = {"images": [[noise((40, 24))]]} if "images" in media else {}
        if "videos" in media:
            frames, metadata = zip(*(whole_video(files[name]) for name in media["videos"]), strict=True)
            options |= {"videos": list(frames), "video_metadata": list(metadata)}
        written = asked.replace("<image>", f"<|vision_start|>{IMAGE}<|vision_end|>")
        written = written.replace("<video>", f"<|vision_start|>{VIDEO}<|vision_end|>")
        prompt = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
        texts = (prompt, f"{prompt}{column} {number}<|im_end|>")
        before, whole = (processor(text=[text], return_tensors="pt", **options) for text in texts)
        first = before["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**whole).logits[0].log_softmax(-1)
        learned = whole["input_ids"][0, first:]
        total -= float(logits[first - 1 : -1].gather(1, learned[:, None]).sum())
        num_tokens += len(learned)
    return total / num_tokens


def test_supervised_training_begins_with_the_loss_of_transformers_and_its_export_samples_alike(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "completion")
    losses = losses_of(tmp_path, inputs, "sft", global_batch_size=4)
    exported = tmp_path / "work" / "model"
    expected = loss_of_transformers(inputs["base"] / "model", exported, "completion")
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    other = loss_of_transformers(inputs["base"] / "model", exported, "completion", OTHER_FILES)
    assert abs(other - expected) > 1e-3, "other frames have another loss"
    assert losses[-1] < losses[0]
    videos = transformers.AutoProcessor.from_pretrained(exported).video_processor
    assert (videos.fps, videos.max_frames, videos.do_sample_frames) == (4.0, 8, True)


@pytest.mark.nightly
def test_other_methods_begin_as_they_do_with_text(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "chosen", "rejected")
    assert losses_of(tmp_path / "dpo", inputs, "dpo", steps=1)[0] == pytest.approx(math.log(2), abs=1e-6)
    write_rows(inputs["rows"] / "data", "completion")
    shutil.copytree(tmp_path / "dpo" / "work" / "model", tmp_path / "start" / "model")
    start = {"base": tmp_path / "start", "teacher": tmp_path / "start", "rows": inputs["rows"]}
    assert losses_of(tmp_path / "distill", start, "distill", teacher="teacher", steps=1, media={})[0] < 1e-6
    rows = map(json.loads, (inputs["rows"] / "data" / "train.jsonl").read_text().splitlines())
    labelled = [{**row, "label": number % 2 == 0} for number, row in enumerate(rows)]
    (inputs["rows"] / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    assert losses_of(tmp_path / "kto", inputs, "kto", steps=1)[0] == pytest.approx(0.5, abs=1e-6)


def test_a_rate_is_asked_for_and_needs_videos(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", "completion")
    with pytest.raises(ModelError, match=r"does not say how many frames of a video .* set, for example, `media: \{fps"):
        losses_of(tmp_path, inputs, "sft", media={})
    row = json.dumps({"prompt": [{"role": "user", "content": "?"}], "completion": "b", "images": "a.png"})
    (inputs["rows"] / "data" / "train.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"`media.fps` and `media.max_frames`: the rows have no videos"):
        losses_of(tmp_path, inputs, "sft")


def with_frames_cut(kind):
    content = video(kind=kind)
    return content[: len(content) * 4 // 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "which is no video that can be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n", "which is no video that can be decoded"),
        (with_frames_cut("mp4"), "which is (no video that can be decoded|damaged: it says of no frame)"),
        (with_frames_cut("avi"), "which is cut off: it has [0-9]+ of 20 frames"),
        (video((8, 808)), "which has 8 × 808 pixels; expected sides of at most 100 to 1"),
        (repeated_frame((4096, 4096), 1), "which has frames of 4096 × 4096 pixels; expected at most 8,388,608"),
        (repeated_frame((3840, 2160), 2080), "which has 2,080 frames of 3840 × 2160 pixels, in all 17,252,352,000;"),
        (video((16, 16), 1), r"media, of which one has too few frames \(1\) for the model's processor"),
    ],
    ids=["text", "a list of addresses", "mp4 cut", "avi cut", "a strip", "too large", "too long", "too short"],
)
def test_what_is_wrong_with_a_video_is_said_by_row(tmp_path, inputs, content, message):
    write_rows(inputs["rows"] / "data", "completion")
    (inputs["rows"] / "data" / "a.mp4").write_bytes(content)
    begin_s = time.process_time()
    with pytest.raises(DataError, match=r"train.jsonl:1 has .*" + message):
        losses_of(tmp_path, inputs, "sft")
    assert time.process_time() - begin_s < 10


@pytest.mark.nightly
def test_frames_that_grow_after_those_that_are_looked_at_end_the_decoding():
    small, large = repeated_frame((64, 64), 100), repeated_frame((3840, 2160), 2100)
    size = videos.inspect_video(small + large)
    assert (size.width, size.num_frames) == (64, 2200)
    with pytest.raises(MediaError, match="frames of more than 17,179,869,184 pixels together, which its header does"):
        videos.decode_video(small + large, size, [size.num_frames - 1])


def test_without_pyav_a_row_says_how_to_install_it(tmp_path, inputs, monkeypatch):
    write_rows(inputs["rows"] / "data", "completion")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match="PyAV decodes, and that is not installed: run `make media`"):
        losses_of(tmp_path, inputs, "sft")
