"""Trainings on rows with sounds have the loss that Transformers computes on what librosa would make of them."""

import base64
import io
import json
import math
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import soxr
import torch
import transformers
from safetensors.torch import load_file, save_file

from stages.core.errors import DataError, ModelError, ResourceError
from stages.engines.export import weight_shapes
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.parts import parts_of
from stages.engines.media import with_media
from stages.kinds.quantize.layers import build_without_weights, check_nothing_lost
from stages.models.media import SoundSize
from stages.models.processor import MediaProcessor
from tests.unit.stages.data.media.conftest import byte_tokenizer, sound
from tests.unit.stages.kinds.train.media_training import (
    first_losses,
    losses_of,
    mean_loss,
    merged_and_quantized,
    shown,
    write_rows,
)
from tests.zoo.models import tiny_model

SPECIAL = ["<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>"]
BEGIN, END, SOUND = *SPECIAL[4:], "<|AUDIO|>"
TEMPLATE = f"""\
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message['role'] + '\\n' }}}}
    {{%- if message['content'] is string %}}
        {{{{- message['content'] }}}}
    {{%- else %}}
        {{%- for part in message['content'] %}}
            {{{{- part['text'] if part['type'] == 'text' else '{BEGIN}{SOUND}{END}' }}}}
        {{%- endfor %}}
    {{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}
"""
WEIGHTS = "model.safetensors"
FILES = {
    "a.wav": sound(),
    "b.flac": sound(0.6, 22050, 2, 1, "FLAC"),
    "c.ogg": sound(1.5, 44100, 1, 2, "OGG"),
    "d.mp3": sound(0.5, 8000, 1, 3, "MP3"),
}
ASKED = (
    ("<audio>what?", {"audios": ["a.wav"]}),
    ("text alone?", {}),
    ("<audio>then<audio>?", {"audios": ["b.flac", "c.ogg"]}),
    ("<audio>at the end", {"audio": "d.mp3"}),
)
"""Questions of the rows, with their sounds."""


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path)


def make_inputs(tmp_path, seconds=2):
    """Write a tiny Qwen2-Audio that hears so many seconds and sounds for rows; return the stage's inputs."""
    model, data = tmp_path / "base" / "model", tmp_path / "rows" / "data"
    for folder in (model, data):
        folder.mkdir(parents=True)
    fast = byte_tokenizer([*SPECIAL, SOUND], audio_token=SOUND, audio_bos_token=BEGIN, audio_eos_token=END)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    transformers.Qwen2AudioProcessor(extractor, fast, chat_template=TEMPLATE).save_pretrained(model)
    text = {"vocab_size": len(fast), "pad_token_id": fast.pad_token_id, "max_position_embeddings": 320}
    fields = tiny_model("qwen2_audio").config.to_dict()
    own = {"text_config": fields["text_config"] | text, "audio_token_index": fast.convert_tokens_to_ids(SOUND)}
    own["audio_config"] = fields["audio_config"] | {"max_source_positions": 50 * seconds}
    tiny_model("qwen2_audio", **own).save_pretrained(model)
    save_file(published(load_file(model / WEIGHTS)), model / WEIGHTS, metadata={"format": "pt"})
    for name, content in FILES.items():
        (data / name).write_bytes(content)
    return {"base": tmp_path / "base", "rows": tmp_path / "rows"}


def published(weights):
    """Return weights under the names of the hub's files, in one of which Transformers saves a word twice."""
    return {name.replace("language_model.model.model.", "language_model.model."): one for name, one in weights.items()}


def heard(content):
    """Return a sound's samples as librosa loads them for a rate of 16000: float32 [samples]."""
    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    found = soxr.resample(samples.mean(axis=1), rate, 16000)
    length = math.ceil(len(samples) * 16000 / rate)
    return np.pad(found, (0, max(0, length - len(found))))[:length]


def loss_of_transformers(folder, exported, quieter=1.0):
    """Return the mean negative log-likelihood of the answers' tokens, each row alone. exported: with the processor."""
    documents = []
    for number, (asked, media) in enumerate(ASKED):
        names = [name for names in media.values() for name in ([names] if isinstance(names, str) else names)]
        options = {"audio": [heard(FILES[name]) * quieter for name in names], "sampling_rate": 16000} if names else {}
        written = asked.replace("<audio>", f"{BEGIN}{SOUND}{END}")
        prompt = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
        documents.append((prompt, f"completion {number}<|im_end|>", options))
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return mean_loss(model, transformers.AutoProcessor.from_pretrained(exported), documents)


def test_supervised_training_begins_with_the_loss_of_transformers_and_its_export_hears(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    losses = losses_of(tmp_path, inputs, global_batch_size=4)
    exported = tmp_path / "work" / "model"
    expected = loss_of_transformers(inputs["base"] / "model", exported)
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    other = loss_of_transformers(inputs["base"] / "model", exported, quieter=0.01)
    assert abs(other - expected) > 1e-3, "other sounds have another loss"
    assert losses[-1] < losses[0]
    assert loss_of_transformers(exported, exported) < expected
    assert load_file(exported / WEIGHTS).keys() == load_file(inputs["base"] / "model" / WEIGHTS).keys()


def test_spectrograms_of_a_batch_are_made_once(inputs):
    processor = MediaProcessor(inputs["base"] / "model")
    sizes = [SoundSize(8000, 16000), SoundSize(16000, 16000)]
    documents = [
        torch.tensor([token for size in own for token in processor.token_ids(size)]) for own in (sizes, sizes[:1])
    ]
    counted = processor.patches_by_tower([*sizes, sizes[0]])
    processor.patches.cache_clear()
    sounds = [[processor.drawn(one) for one in own] for own in (sizes, sizes[:1])]
    batch = with_media(packed(documents), sounds, processor)
    assert processor.patches.cache_info().misses == 0
    assert batch.inputs.media.patches == counted and len(counted["audio_tower"]) == 3


@pytest.mark.nightly
def test_other_methods_begin_as_they_do_with_text(tmp_path, inputs):
    dpo, distilled, kto = first_losses(tmp_path, inputs, ASKED)
    assert dpo == pytest.approx(math.log(2), abs=1e-6)
    assert distilled < 1e-6
    assert kto == pytest.approx(0.5, abs=1e-6)


def test_a_quantizer_knows_weights_by_the_names_that_files_have(inputs):
    """Transformers writes this decoder as `language_model.model`, and has it as `language_model`."""
    folder = inputs["base"] / "model"
    assert any(name.startswith("language_model.model.") for name in weight_shapes(folder))
    check_nothing_lost(build_without_weights(folder, trust_remote_code=False), folder)


@pytest.mark.nightly
def test_an_adapter_is_merged_and_quantized_with_sounds_and_the_tower_of_sounds_stays(tmp_path, inputs):
    metrics = merged_and_quantized(tmp_path, inputs, ASKED)
    assert metrics.pop("merged")["max_abs_logprob_difference"] < 1e-5
    for method, found in metrics.items():
        assert 0 < found["kl_nats_per_token"] < 0.01, method
        assert (found["audio_tower_tensors_kept"], found["projector_tensors_kept"]) == (37, 2), method
        assert found["calibration_sounds"] == 4, "rows without sounds are left out"


@pytest.mark.nightly
def test_every_parameter_is_in_one_part_and_frozen_parts_stay(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    load = transformers.AutoModelForMultimodalLM.from_pretrained
    before = load(inputs["base"] / "model")
    parts = parts_of(before)
    names = [name for named in parts.values() for name in named]
    assert sorted(names) == sorted(name for name, _ in before.named_parameters())
    assert [part for part, named in parts.items() if not named] == ["vision_tower"]
    for part in ("audio_tower", "projector", "language_model"):
        losses_of(tmp_path / part, inputs, freeze=[part], steps=1)
        after = dict(load(tmp_path / part / "work" / "model").named_parameters())
        changed = {name for name, one in before.named_parameters() if not one.equal(after[name])}
        assert not changed & parts[part].keys()
        assert all(changed & named.keys() for other, named in parts.items() if named and other != part)
    with pytest.raises(ModelError, match=r"`freeze` names vision_tower, which Qwen2Audio.* does not have"):
        losses_of(tmp_path, inputs, freeze=["vision_tower"])


def rows_inside(data, how):
    """Write the first row with its sound's bytes inside of it, and no file beside it."""
    content = (data / "a.wav").read_bytes()
    (data / "a.wav").unlink()
    row = {"messages": [{"role": "user", "content": ASKED[0][0]}, {"role": "assistant", "content": "completion 0"}]}
    if how == "Parquet":
        pq.write_table(
            pa.Table.from_pylist([row | {"audio": {"bytes": content, "path": None}}]), data / "train.parquet"
        )
        return
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}
    row["messages"][0]["content"] = [part, {"type": "text", "text": "what?"}]
    (data / "train.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize("how", ["Parquet", pytest.param("input_audio", marks=pytest.mark.nightly)])
def test_sounds_inside_of_rows_are_those_of_files(tmp_path, inputs, how, monkeypatch):
    rows_inside(inputs["rows"] / "data", how)
    losses = losses_of(tmp_path, inputs, steps=1, global_batch_size=1)
    monkeypatch.setattr(sys.modules[__name__], "ASKED", ASKED[:1])
    assert losses[0] == pytest.approx(
        loss_of_transformers(inputs["base"] / "model", inputs["base"] / "model"), abs=1e-5
    )


def test_data_are_shown_with_the_seconds_and_tokens_of_their_sounds(tmp_path, inputs):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    captions, page = shown(tmp_path, inputs, inputs["base"] / "model")
    assert captions == [
        "a.wav: 1.0 seconds, 25 tokens",
        "b.flac: 0.6 seconds, 15 tokens",
        "c.ogg: 1.5 seconds, 37 tokens",
        "d.mp3: 0.5 seconds, 12 tokens",
    ]
    assert "1.5 seconds" in page and "<img" not in page


def cut(kind, **options):
    content = sound(kind=kind, **options)
    return content[: len(content) * 3 // 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "which is no sound that can be decoded"),
        (sound(kind="AIFF"), "which is a sound of the format AIFF; expected WAV, FLAC, OGG or MP3"),
        (cut("WAV"), "which is cut off: its header says that it is longer"),
        (cut("FLAC"), "which is no sound that can be decoded"),
        (cut("OGG"), "which is cut off: its header says that it is longer"),
        (cut("MP3"), "which is cut off: it has [0-9,]+ of 16,000 samples"),
        (sound(0.05), "which has 0.05 seconds; expected at least 0.1"),
        (sound(0.5, 96000), "which has 96,000 samples a second; expected at most 48,000"),
        (sound(0.5, 8000, 9), "which has 9 channels; expected at most 8"),
        (sound(1801, 100, subtype="PCM_U8"), "which has 1,801 seconds; expected at most 1,800"),
        (sound(2.1), r"media, of which one has 2.1 seconds, of which the model's processor takes the first alone"),
    ],
    ids=["text", "AIFF", "WAV", "FLAC", "OGG", "MP3", "short", "fast", "channels", "long", "longer-than-the-model"],
)
def test_what_is_wrong_with_a_sound_is_said_by_row(tmp_path, inputs, content, message):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    (inputs["rows"] / "data" / "a.wav").write_bytes(content)
    with pytest.raises(DataError, match=r"train.jsonl:1 has .*" + message):
        losses_of(tmp_path, inputs)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_without_a_decoder_of_sounds_no_row_is_bad_and_it_is_said_how_to_install_it(
    tmp_path, inputs, monkeypatch, package
):
    write_rows(inputs["rows"] / "data", ASKED, "completion")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ResourceError, match=r"soundfile and soxr decode, and these do not work .*: run `make media`"):
        losses_of(tmp_path, inputs)
