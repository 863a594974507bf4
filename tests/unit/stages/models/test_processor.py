"""A model's processor is asked about pictures by their size alone, and says what it says of the pictures themselves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from stages.core.errors import DataError, ModelError
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_media
from stages.models.media import VideoSize
from stages.models.processor import MediaProcessor
from stages.models.tower import num_patches, patch_side
from tests.zoo.models import tiny_config
from tests.zoo.pictures import picture, save_family
from tests.zoo.processors import save_processor

SIZES = ((64, 40), (31, 57), (100, 33))
FAMILIES = ("gemma3", "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny_config(request.param).save_pretrained(folder)
    save_processor(request.param, folder)
    return folder


def test_sizes_give_the_tokens_that_pictures_give(folder: Path) -> None:
    media, reference = MediaProcessor(folder), AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "n5"}, {"type": "image"}, {"type": "image"}]
    text = reference.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    replacements = media.replacements(text, SIZES)
    expanded = text
    for one in reversed(replacements):
        expanded = expanded[: one.start] + one.text + expanded[one.end :]
    ids = reference.tokenizer(expanded, add_special_tokens=False)["input_ids"]
    given = reference(text=[text], images=[[*map(picture, SIZES)]], return_tensors="pt")
    assert ids == given["input_ids"][0].tolist()
    assert sum(one in media.media_token_ids for one in ids) > len(SIZES)
    assert sum(map(media.num_patches, SIZES)) == num_patches(given["pixel_values"].shape, patch_side(media.config))
    inserted = sum(media.num_tokens(size) - 1 for size in SIZES)
    assert len(ids) == len(reference.tokenizer(text, add_special_tokens=False)["input_ids"]) + inserted


def test_documents_are_merged_to_what_one_call_gives(folder: Path) -> None:
    media, reference = MediaProcessor(folder), AutoProcessor.from_pretrained(folder)
    pictures = [*map(picture, SIZES)]
    merged = media.merged([media.features(pictures[:1]), media.features([]), media.features(pictures[1:])])
    given = reference.image_processor(pictures, return_tensors="pt")
    assert merged.keys() <= given.keys()
    for name, value in merged.items():
        assert torch.equal(value, given[name]), name


def test_pixels_that_stay_bytes_become_the_features_of_the_processor(folder: Path) -> None:
    """Pictures and a video, with what is not normalised later (Gemma 3's) as the processor makes it."""
    media, reference = MediaProcessor(folder), AutoProcessor.from_pretrained(folder)
    pictures = [*map(picture, SIZES)]
    parts = [[*media.token_ids(size), 5] for size in SIZES]
    ids = [torch.tensor(parts[0] + parts[1]), torch.tensor(parts[2])]
    inputs = with_media(packed(ids), [pictures[:2], pictures[2:]], media).inputs.media
    assert inputs is not None
    given = reference.image_processor(pictures, return_tensors="pt")
    assert all(torch.equal(value, given[name]) for name, value in inputs.arguments.items())
    assert (inputs.features["pixel_values"].dtype == torch.uint8) == ("image_grid_thw" in given)


def test_pixels_of_videos_stay_bytes_too(tmp_path: Path) -> None:
    media = MediaProcessor(save_family("qwen3_vl", tmp_path))
    video = media.drawn(VideoSize(80, 48, 30, 10.0), seed=1)
    inputs = with_media(packed([torch.tensor(media.token_ids(video.size))]), [[video]], media).inputs.media
    assert inputs is not None
    assert inputs.features["pixel_values_videos"].dtype == torch.uint8
    assert inputs.arguments["pixel_values_videos"].equal(media.features([video])["pixel_values_videos"])


@pytest.mark.parametrize("change", [{"do_normalize": False}, {"image_std": 0.25}, {"rescale_factor": 1 / 256}])
def test_processors_that_normalise_otherwise_are_followed(change: dict[str, Any], tmp_path: Path) -> None:
    save_family("qwen2_5_vl", tmp_path)
    file = tmp_path / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"] |= change
    file.write_text(json.dumps(content))
    media, reference = MediaProcessor(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    (size,) = SIZES[:1]
    inputs = with_media(packed([torch.tensor(media.token_ids(size))]), [[picture(size)]], media).inputs.media
    given = reference.image_processor([picture(size)], return_tensors="pt")
    assert inputs is not None
    assert inputs.arguments["pixel_values"].equal(given["pixel_values"])


def test_other_numbers_of_placeholders_and_pictures_are_refused(folder: Path) -> None:
    media = MediaProcessor(folder)
    with pytest.raises(DataError, match=r"0 placeholders .* for 3 media"):
        media.replacements("n5", SIZES)
    assert media.replacements("n5", ()) == ()


def test_a_folder_without_processor_reads_text_alone(folder: Path, tmp_path: Path) -> None:
    assert MediaProcessor.of(tmp_path) is None
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="the processor in"):
        MediaProcessor.of(tmp_path)


def test_a_long_video_is_seen_to_its_end_and_times_of_its_frames_are_said(tmp_path: Path) -> None:
    """A video of ten minutes gives as many frames as the model takes, from all of it, as in Transformers."""
    media = MediaProcessor(save_family("qwen3_vl", tmp_path))
    videos = media._processor.video_processor
    videos.fps, videos.max_frames, videos.do_sample_frames = 2, 16, True
    size = VideoSize(32, 32, 18_000, 30.0)
    found = [*media.taken(size)]
    assert found == videos.sample_frames(VideoMetadata(total_num_frames=18_000, fps=30.0), fps=2).tolist()
    assert len(found) == 16 and found[0] == 0 and found[-1] == 17_999
    (text,) = media._replaced((size,))
    seconds = [float(one) for one in re.findall(r"<([0-9.]+) seconds>", text)]
    of_frames = [frame / 30 for frame in found]  # two of which stand together, at the time between them
    assert seconds == pytest.approx(
        [(first + second) / 2 for first, second in zip(of_frames[::2], of_frames[1::2], strict=True)], abs=0.06
    )
