"""Trainings on rows with videos have the loss that Transformers computes on the frames that its processor takes."""

import io
import json
import math
import resource
import sys
import time
from collections import defaultdict

import av
import numpy as np
import psutil
import pytest
import torch
import transformers
from transformers.video_utils import VideoMetadata

from stages.core.errors import DataError, ModelError, ResourceError
from stages.data.media import videos
from stages.hubs.builtin import qwen3_vl
from stages.models.media import MediaError
from tests.unit.stages.data.media.conftest import byte_tokenizer, encoded, noise, packed_frames, repeated_frame, video
from tests.unit.stages.kinds.train.media_training import (
    first_losses,
    losses_of,
    mean_loss,
    merged_and_quantized,
    shown,
    write_rows,
)
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
    return make_inputs(tmp_path)


def make_inputs(tmp_path, family="qwen2_5_vl", processor=transformers.Qwen2_5_VLProcessor, of_videos="Qwen2VL"):
    """Write a tiny model of a family of Qwen's and a folder of media for rows; return the stage's inputs."""
    model, data = tmp_path / "base" / "model", tmp_path / "rows" / "data"
    for folder in (model, data):
        folder.mkdir(parents=True)
    fast = byte_tokenizer([*SPECIAL, IMAGE, VIDEO], image_token=IMAGE, video_token=VIDEO)
    images, videos = (
        made(**QWEN_SIZE)
        for made in (transformers.Qwen2VLImageProcessor, getattr(transformers, f"{of_videos}VideoProcessor"))
    )
    processor(images, fast, videos, chat_template=TEMPLATE).save_pretrained(model)
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": SPECIAL[4]}
    names["vision_end_token_id"] = SPECIAL[5]
    ids = {name: fast.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {"vocab_size": len(fast), "pad_token_id": fast.pad_token_id, "max_position_embeddings": 512}
    config = tiny_model(family).config.to_dict()
    tiny_model(family, text_config=config["text_config"] | text, **ids).save_pretrained(model)
    for name, content in {**FILES, "a.png": encoded(noise((40, 24)))}.items():
        (data / name).write_bytes(content)
    return {"base": tmp_path / "base", "rows": tmp_path / "rows"}


def whole_video(content):
    """Return all frames of a video, uint8 [frames, height, width, 3], and what Transformers asks about it."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = np.stack([one.to_ndarray(format="rgb24") for one in container.decode(stream)])
    return frames, VideoMetadata(total_num_frames=len(frames), fps=float(stream.average_rate))


def loss_of_transformers(folder, exported, files=FILES):
    """Return the mean negative log-likelihood of the answers' tokens, each row alone. exported: with the processor."""
    documents = []
    for number, (asked, media) in enumerate(ASKED):
        options = {"images": [[noise((40, 24))]]} if "images" in media else {}
        if "videos" in media:
            frames, metadata = zip(*(whole_video(files[name]) for name in media["videos"]), strict=True)
            options |= {"videos": list(frames), "video_metadata": list(metadata)}
        written = asked.replace("<image>", f"<|vision_start|>{IMAGE}<|vision_end|>")
        written = written.replace("<video>", f"<|vision_start|>{VIDEO}<|vision_end|>")
        prompt = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
        documents.append((prompt, f"completion {number}<|im_end|>", options))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return mean_loss(model, transformers.AutoProcessor.from_pretrained(exported), documents)


def test_supervised_training_begins_with_the_loss_of_transformers_and_its_export_samples_alike(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    losses = losses_of(tmp_path, inputs, global_batch_size=4, media=SAMPLING)
    exported = tmp_path / "work" / "model"
    expected = loss_of_transformers(inputs["base"] / "model", exported)
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    other = loss_of_transformers(inputs["base"] / "model", exported, OTHER_FILES)
    assert abs(other - expected) > 1e-3, "other frames have another loss"
    assert losses[-1] < losses[0]
    videos = transformers.AutoProcessor.from_pretrained(exported).video_processor
    assert (videos.fps, videos.max_frames, videos.do_sample_frames) == (4.0, 8, True)
    captions, page = shown(tmp_path, inputs, exported)
    assert "a.mp4: 64 × 48 pixels, 2.0 seconds, 8 frames, 48 tokens" in captions
    assert "c.webm: 40 × 40 pixels, 3.0 seconds, 8 frames, 16 tokens" in captions
    assert page.count("<img") == len(captions)


@pytest.mark.nightly
def test_other_methods_begin_as_they_do_with_text(tmp_path, inputs):
    dpo, distilled, kto = first_losses(tmp_path, inputs, ASKED, media=SAMPLING)
    assert dpo == pytest.approx(math.log(2), abs=1e-6)
    assert distilled < 1e-6
    assert kto == pytest.approx(0.5, abs=1e-6)


@pytest.mark.nightly
def test_an_adapter_is_merged_and_quantized_with_videos_and_the_tower_stays(tmp_path, inputs):
    metrics = merged_and_quantized(tmp_path, inputs, ASKED, media=SAMPLING)
    assert metrics.pop("merged")["max_abs_logprob_difference"] < 1e-5
    for method, found in metrics.items():
        assert 0 < found["kl_nats_per_token"] < 0.01, method
        assert (found["vision_tower_tensors_kept"], found["projector_tensors_kept"]) == (25, 5), method
        assert found["calibration_videos"] == 3, "rows with other media, or none, are left out"


def test_a_rate_is_asked_for_and_needs_videos(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    with pytest.raises(ModelError, match=r"does not say how many frames of a video .* set, for example, `media: \{fps"):
        losses_of(tmp_path, inputs)
    row = json.dumps({"prompt": [{"role": "user", "content": "?"}], "completion": "b", "images": "a.png"})
    (inputs["rows"] / "data" / "train.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"`media.fps` and `media.max_frames`: the rows have no videos"):
        losses_of(tmp_path, inputs, media=SAMPLING)


def with_frames_cut(kind):
    content = video(kind=kind)
    return content[: len(content) * 4 // 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "which is no video that can be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n", "which is no video that can be decoded"),
        (with_frames_cut("mp4"), "which is (no video that can be decoded|damaged, or of a codec that is not known)"),
        (with_frames_cut("avi"), "which is cut off: it has [0-9]+ of 20 frames"),
        (video((8, 808)), "which has 8 × 808 pixels; expected sides of at most 100 to 1"),
        (repeated_frame((4096, 4096), 1), "which has frames of 4096 × 4096 pixels; expected at most 8,388,608"),
        (repeated_frame((3840, 2160), 2080), "which has 2,080 frames of 3840 × 2160 pixels, in all 17,252,352,000;"),
        (video((16, 16), 1), r"media, of which one has too few frames \(1\) for the model's processor"),
    ],
    ids=["text", "a list of addresses", "mp4 cut", "avi cut", "a strip", "too large", "too long", "too short"],
)
def test_what_is_wrong_with_a_video_is_said_by_row(tmp_path, inputs, content, message):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    (inputs["rows"] / "data" / "a.mp4").write_bytes(content)
    begin_s = time.process_time()
    with pytest.raises(DataError, match=r"train.jsonl:1 has .*" + message):
        losses_of(tmp_path, inputs, media=SAMPLING)
    assert time.process_time() - begin_s < 10


@pytest.mark.nightly
def test_frames_that_grow_after_those_that_are_looked_at_end_the_decoding():
    small, large = repeated_frame((64, 64), 100), repeated_frame((3840, 2160), 2100)
    size = videos.inspect_video(small + large)
    assert (size.width, size.num_frames) == (64, 2200)
    with pytest.raises(MediaError, match="frames of more than 17,179,869,184 pixels together, which its header does"):
        videos.decode_video(small + large, size, [size.num_frames - 1])


def test_a_packet_that_takes_hours_ends_with_the_process_that_decodes_it():
    """Seconds of a core are bounded by the kernel, since FFmpeg decodes a packet in one step; others are decoded on."""
    hostile = packed_frames((3840, 2160), 100_000)
    size, decoder = videos.inspect_video(FILES["a.mp4"]), decoding_process()
    used_s = math.ceil(sum(decoder.cpu_times()[:2]))
    resource.prlimit(decoder.pid, resource.RLIMIT_CPU, (used_s + 2, used_s + 2))
    with pytest.raises(MediaError, match="takes more time or memory to decode than a video may"):
        videos.inspect_video(hostile)
    assert not decoder.is_running()
    assert videos.inspect_video(FILES["a.mp4"]) == size


def test_a_video_for_which_there_is_no_memory_ends_the_process_that_decodes_it():
    size, decoder = videos.inspect_video(FILES["a.mp4"]), decoding_process()
    resource.prlimit(decoder.pid, resource.RLIMIT_AS, (decoder.memory_info().vms + 2**23, resource.RLIM_INFINITY))
    with pytest.raises(MediaError, match="takes more time or memory to decode than a video may"):
        videos.inspect_video(video((3840, 2160), 2))
    assert not decoder.is_running()
    assert videos.inspect_video(FILES["a.mp4"]) == size


def decoding_process():
    children = {child: child.as_dict(["cmdline"])["cmdline"] or () for child in psutil.Process().children()}
    (found,) = (child for child, line in children.items() if "stages.data.media.video_program" in line)
    return found


def test_without_pyav_a_row_says_how_to_install_it(tmp_path, inputs, monkeypatch):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ResourceError, match="PyAV decodes, and that is not installed: run `make media`"):
        losses_of(tmp_path, inputs, media=SAMPLING)


def test_a_decoder_that_does_not_work_is_no_fault_of_the_video(tmp_path, monkeypatch):
    (tmp_path / "av.py").write_text("raise ImportError('libx264.so is missing')")
    size = videos.inspect_video(FILES["a.mp4"])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.setattr(videos, "_idle", defaultdict(list))
        with pytest.raises(ResourceError, match=r"does not work: ImportError: libx264.so is missing; check PyAV"):
            videos.inspect_video(FILES["a.mp4"])
    with monkeypatch.context() as patch:
        patch.setattr(videos, "_path_of", lambda descriptor: "/proc/1/no-such-folder/0")
        with pytest.raises(ResourceError, match=r"does not work: FileNotFoundError: .* check PyAV"):
            videos.inspect_video(FILES["a.mp4"])
    assert videos.inspect_video(FILES["a.mp4"]) == size
